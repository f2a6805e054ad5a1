"""Screen of `moeplan profile`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ...profilers.origin import Origin
from ...profilers.predictor import ANY_BYTES, predicted
from ...profilers.presets import PRESETS, load_preset
from ...profilers.profile import Profile
from ...profilers.series import Series, series_key
from ..figures import link_text, percent

LEGEND = "error: median and 95th percentile, on sizes that the fit had not seen; intervals of plans hold it"
FAR_OFF = 0.5  # from what was measured


def profile_report(profile: Profile, path: Path, console: Console) -> None:
    """Print the origins and remarks on them, a line per series, the links, and the file."""
    for label, text in _origins(profile.origins):
        console.print(f"{label:10}{text}")
    if profile.series:
        console.print()
        console.print(_series_table(profile))
        console.print(f"{LEGEND}{_furthest(profile)}")
        console.print()
    for kind, link in profile.cluster.links.items():
        source = profile.link_origins[kind] + 1
        origin = f", from [{source}]" if len(profile.origins) > 1 else ""
        console.print(f"link      {kind}: {link_text(link)}{origin}")
    for text in _uneven(profile):
        console.print(f"uneven    {text}")
    if not profile.complete:
        console.print("stopped by Ctrl-C: the profile holds what was measured until then; --resume continues it")
    console.print(f"wrote     {path}    cluster {profile.cluster}")


def remarks(profile: Profile) -> list[str]:
    """Remarks on the machine, in plain words: its topology and its noise."""
    return [text for origin in profile.origins for label, text in _noticed(origin)]


def preset_rows() -> list[dict[str, Any]]:
    """Contents of each preset: GPU, node, cases measured, dtypes and source."""
    rows = []
    for name, preset in PRESETS.items():
        profile = load_preset(name)
        measured = [one for one in profile.series.values() if one.fit and one.fit.model.kind != "roofline"]
        rows.append(
            {
                "preset": name,
                "device": preset.device,
                "memory_gb": preset.memory_gb,
                "node": str(profile.cluster),
                "measured": list(dict.fromkeys(one.case for one in measured)),
                "dtypes": list(dict.fromkeys(one.dtype for one in measured if one.dtype != ANY_BYTES)),
                "source": [origin.name for origin in profile.origins],
            }
        )
    return rows


def presets_report(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A line a preset, then where each is from."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for header in ("preset", "GPU", "memory", "node", "dtypes", "measured"):
        table.add_column(header)
    for row in rows:
        memory, dtypes = f"{row['memory_gb']} GB", ", ".join(row["dtypes"])
        table.add_row(row["preset"], row["device"], memory, row["node"], dtypes, ", ".join(row["measured"]))
    console.print(table)
    console.print()
    for row in rows:
        console.print(f"{row['preset']:10}{'; '.join(map(_shown, row['source']))}")


def _shown(origin: str) -> str:
    """Name of an origin; a table that is named as its library is named once."""
    return re.sub(r"\b(\w+) \1\b", r"\1", origin)


def _origins(origins: Sequence[Origin]) -> Iterator[tuple[str, str]]:
    """Label and text of each line about where the profile comes from."""
    for number, origin in enumerate(origins, 1):
        source, environment = f"[{number}] " if len(origins) > 1 else "", origin.environment
        if environment is None:
            yield origin.kind, f"{source}{_shown(origin.name or 'a cluster')}"
        else:
            named = f"{source}{origin.name}: " if origin.name else source
            yield (
                "measured",
                f"{named}{environment.num_ranks} ranks on {environment.num_hosts} host(s), {environment.device},"
                f" {environment.backend}, torch {environment.torch}, {environment.threads} thread(s) a rank",
            )
        yield from _noticed(origin)
    if all(origin.environment is None for origin in origins):
        yield "", "nothing was measured on this machine"


def _noticed(origin: Origin) -> Iterator[tuple[str, str]]:
    if origin.topology is not None:
        yield "topology", str(origin.topology)
        if not origin.topology.agrees:
            yield "", "measured topology contradicts the hosts; links are classed by host"
    if origin.left_out:
        yield "left out", f"{origin.left_out} sizes for which the time was too short; --full measures all"
    if origin.noise is not None:
        yield "noise", str(origin.noise)


def _uneven(profile: Profile) -> Iterator[str]:
    """Time of uneven over even exchanges with the same load on the busiest port."""
    for one in profile.series.values():
        even = profile.series.get(series_key("all_to_all", one.dtype, one.ranks, one.link))
        if one.case != "uneven_all_to_all" or one.ranks < 2 or even is None or even.fit is None:
            continue
        port = np.array([measured.work for measured in one.measurements], np.float64)
        expected = predicted(even, {"bytes": port * one.ranks / (one.ranks - 1)})
        ratios = np.array([measured.mean_s for measured in one.measurements])[~expected.extrapolated]
        ratios /= expected.seconds[~expected.extrapolated]
        if len(ratios):
            yield (
                f"{one.key} took {np.median(ratios):.2g} times as long ({ratios.min():.2g} to {ratios.max():.2g}) as an"
                " even exchange with the same load on the busiest port"
            )


def _series_table(profile: Profile) -> Table:
    """A line a series: times, peak rate, chosen model, its error on held-out sizes."""
    table, several = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style=""), len(profile.origins) > 1
    for header in (*(["from"] * several), "series", "a call", "peak", "model", "error"):
        table.add_column(header, justify="left" if header in ("from", "series", "model") else "right", no_wrap=True)
    for key, one in profile.series.items():
        missing = profile.origins[one.origin].missing.get(key, 0)
        table.add_row(*([f"[{one.origin + 1}]"] * several), key, *_times(one), *_fitted(one, missing))
    for number, origin in enumerate(profile.origins, 1):
        for key, missing in origin.missing.items():
            if key not in profile.series:
                table.add_row(*([f"[{number}]"] * several), key, "", "", f"0 of {missing} sizes", "no fit")
    return table


def _times(series: Series) -> tuple[str, str]:
    """The range of the medians, and the highest rate: busbw of bytes, FLOP/s of multiply-adds."""
    if not series.measurements:
        return "", ""
    medians = [one.median_s for one in series.measurements]
    if series.fit is None:  # a rate of the smallest sizes alone means nothing
        return f"{_time(min(medians))}-{_time(max(medians))}", ""
    rate = max(one.work / one.median_s for one in series.measurements)
    if series.unit == "bytes":
        peak = f"{rate * 1e-9:.0f} GB/s" if rate >= 1e10 else f"{rate * 1e-9:.2g} GB/s"
    else:
        peak = f"{_digits(rate * 2e-12)} TFLOP/s" if rate > 5e11 else f"{_digits(rate * 2e-9)} GFLOP/s"
    return f"{_time(min(medians))}-{_time(max(medians))}", peak


def _furthest(profile: Profile) -> str:
    """The size that is predicted worst of all, where that is far off; else empty."""
    fits = [(key, one.fit) for key, one in profile.series.items() if one.fit and one.fit.model.kind in one.fit.held_out]
    worst = max(fits, key=lambda row: row[1].held_out[row[1].model.kind].worst_error, default=None)
    if worst is None:
        return ""
    key, fit = worst
    held_out = fit.held_out[fit.model.kind]
    if held_out.worst_error < FAR_OFF:
        return ""
    size = ", ".join(f"{axis} {value:,}" for axis, value in zip(fit.axes, held_out.sizes[0], strict=True))
    return f". Furthest off: {key}, {percent(held_out.worst_error)} at {size}: check such sizes on the machine"


def _fitted(series: Series, missing: int) -> tuple[str, str]:
    """The chosen kind, and its median and 95th percentile error on unseen sizes; without a fit, the sizes there are."""
    fit = series.fit
    if fit is None:
        measured = len(series.measurements)
        return f"{measured} of {measured + missing} sizes", "no fit"
    kind = fit.model.kind.removesuffix("_linear")
    if kind == "roofline":
        return kind, "not measured"
    held_out = fit.held_out.get(fit.model.kind)
    return kind, f"{percent(held_out.median_error)}, {percent(held_out.p95_error)}" if held_out else "untried"


def _time(seconds: float) -> str:
    """Two digits and a unit: 120ns, 12us, 1.2ms."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * scale:
            return f"{_digits(seconds / scale)}{unit}"
    return f"{_digits(seconds / 1e-9)}ns"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"
