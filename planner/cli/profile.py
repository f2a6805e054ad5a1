"""`moeplan profile`: measure this machine, or describe a cluster."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import UsageError
from .screen import Json, console, print_json, progress

if TYPE_CHECKING:
    from ...profilers.profile import Profile

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def profile(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    ranks: Annotated[
        int | None, typer.Option(help="Local processes; 4 on CPU, all GPUs on CUDA.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats.")] = False,
    cluster: Annotated[
        str | None, typer.Option(help="NxG or a cluster.yaml: describe it, measure nothing.", show_default=False)
    ] = None,
    link: Annotated[
        list[str] | None, typer.Option(help="KIND=GBps:us of a described cluster; may repeat.", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds of silence after which a rank counts as hung.")] = 120,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the profile goes.")] = Path("profile.json"),
    as_json: Json = False,
) -> None:
    """Measure GEMM and all-to-all on this machine, or describe a cluster without measuring.

    Under torchrun or srun it joins that world. Where there is no traces/ yet, and it is not in such a world, it also
    records the routing of the small embedded model there, so that moeplan solve has something to plan with.

    \b
    Examples:
      moeplan profile --quick
      moeplan profile --cluster 4x8 --link intra=450:3 --link inter=50:12
    """
    from ...profilers.description import describe
    from ...profilers.profile import save
    from ..profile_report import profile_report

    if not 1 <= timeout <= 86_400:
        raise UsageError(f"--timeout {timeout}; expected 1 to 86400 seconds")
    if link and cluster is None:
        raise UsageError("--link describes a cluster; give --cluster NxG beside it")
    found = describe(cluster, link or ()) if cluster is not None else _measure(device, ranks, quick, timeout)
    if found is None:  # not rank 0 of a launched world
        return
    save(found, output)
    recorded = _record_embedded() if found.complete else None
    if as_json:
        print_json({"profile": str(output), "traces": recorded} | found.model_dump(mode="json"))
    else:
        profile_report(found, output, console())
        _print_next(recorded, output)
    if not found.complete:
        print(f"moeplan: interrupted; {output} holds what was measured until then", file=sys.stderr)
        raise typer.Exit(130)


def _print_next(recorded: str | None, output: Path) -> None:
    if recorded is not None:
        console().print(
            f"NOTE      {recorded}/ was missing: it now holds the routing of moeplan's small embedded TOY model, to try"
            " things out with; record your own model before you plan for it"
        )
    profile = "" if output == Path("profile.json") else f" --profile {output}"
    print(f"next: moeplan solve --strategy exflow{profile}")


def _measure(device: str, ranks: int | None, quick: bool, timeout_s: float) -> "Profile | None":
    from ...profilers.measure import measure

    with progress() as say:
        say("starting ranks")
        return measure(
            num_ranks=ranks,
            device=device,
            quick=quick,
            timeout_s=timeout_s,
            on_progress=lambda step: say(f"{step.case}: {step.done} of {step.total} sizes"),
        )


def _record_embedded() -> str | None:
    """Record the embedded model into traces/ where that is missing and nobody launched this process."""
    from ...profilers.launch import found_launch

    if Path("traces").exists() or found_launch() is not None:
        return None
    from ..demo.record import record_embedded
    from ..demo.text import record_text

    with progress() as say:
        say("recording the embedded model")
        record_embedded(record_text(), "traces")
    return "traces"
