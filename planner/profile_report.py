"""What `moeplan profile` prints of a profile."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..profilers.profile import Profile
from ..profilers.series import Series

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["profile_report"]


def profile_report(profile: Profile, path: Path, console: "Console") -> None:
    """The environment, each case with its fit, the links, and where the file is."""
    environment = profile.environment
    if environment is None:
        console.print(f"described {profile.cluster}, nothing measured")
    else:
        console.print(
            f"measured  {environment.num_ranks} ranks on {environment.num_hosts} host(s), {environment.device},"
            f" {environment.backend}, torch {environment.torch}, {environment.threads} thread(s) a rank"
        )
    for series in profile.series.values():
        console.print()
        console.print(_case_table(series))
        console.print(_fit_line(series))
    for kind, link in profile.cluster.links.items():
        console.print(f"link      {kind}: {1e-9 / link.s_per_byte:.3g} GB/s, {link.latency_s * 1e6:.3g} us")
    if not profile.complete:
        console.print("stopped by Ctrl-C: the profile holds what was measured until then")
    console.print(f"wrote     {path}    cluster {profile.cluster}")


def _case_table(result: Series) -> "Table":
    from rich.table import Table

    rate = "GB/s sent a rank" if result.unit == "bytes" else "GFLOP/s"
    table = Table(result.key, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for header in ("median", "min", "p95", "n", rate):
        table.add_column(header, justify="right")
    for one in result.measurements:
        size = " ".join(f"{key}={value}" for key, value in one.size.items())
        operations = one.work * (1 if result.unit == "bytes" else 2)
        seconds = [f"{s * 1e6:,.0f} us" for s in (one.median_s, one.min_s, one.p95_s)]
        table.add_row(size, *seconds, str(len(one.samples_s)), f"{operations / one.median_s * 1e-9:.3g}")
    return table


def _fit_line(series: Series) -> str:
    fit = series.fit
    if fit is None:
        return "no fit: fewer than two sizes"
    unit = "byte a rank sends" if series.unit == "bytes" else "multiply-add"
    line = f"t = {fit.model.a_s * 1e6:.3g} us + {fit.model.b_s:.3g} s a {unit}"
    if fit.held_out is None:
        return line
    errors = f"median {fit.held_out.median_error:.0%}, worst {fit.held_out.worst_error:.0%}"
    return f"{line}; off by {errors} on the {len(fit.held_out.works)} sizes held out"
