"""`moeplan profile`: measure this machine, take a preset, describe a cluster, read published tables, merge profiles."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import MoeplanError, UsageError
from .flags import Json, optional
from .rules import Rule, check_flags, exclusive
from .screen import console, end_interrupted, print_json, progress, step_progress

if TYPE_CHECKING:
    from ...profilers.cluster import Cluster
    from ...profilers.origin import GridName
    from ...profilers.profile import Profile

GRID = ("--quick", "--full", "--ranks", "--device")
NODE = ("--preset", "--from-tables")
NO_LINK = "--link describes a cluster; give --cluster NxG, --preset or --from-tables beside it"
NO_TABLES = "--system {value} does not say where its tables are; give --from-tables DIR beside it"
NO_SYSTEM = "--from-tables {value} does not say whose tables; give --system NAME beside it"
ATTENTION = "--attention is part of a description; give --cluster NxG beside it, without --preset or --from-tables"
UNMEASURED = "{flag} says how to measure this machine, and nothing is measured here; leave it out"
TWO_GRIDS = "--quick and --full ask for different grids; give one of them, or neither"
RULES = (
    Rule(("--link",), "without", ("--cluster", *NODE), NO_LINK),
    Rule(("--quick",), "with", ("--full",), TWO_GRIDS),
    Rule(("--from-tables",), "without", ("--system",), NO_SYSTEM),
    Rule(("--system",), "without", ("--from-tables",), NO_TABLES),
    Rule(("--attention",), "without", ("--cluster",), ATTENTION),
    Rule(("--attention",), "with", NODE, ATTENTION),
    Rule(("PROFILES",), "without", ("--merge",), "{value[0]}: profiles are only given with --merge"),
    exclusive(*NODE, "--merge", "--resume"),
    exclusive("--cluster", "--merge", "--resume"),
    Rule(GRID, "with", ("--merge", "--cluster", *NODE), UNMEASURED),
)


def profile(
    profiles: Annotated[
        list[Path] | None, typer.Argument(help="With --merge: the profiles.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    ranks: Annotated[int | None, optional("Local processes; 4 on CPU, all GPUs on CUDA.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats: under a minute.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every case, size and dtype: many minutes.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the profile in the output file.")] = False,
    preset: Annotated[str | None, optional("Curves that ship: h100_sxm or h200_sxm; or list.")] = None,
    cluster: Annotated[str | None, optional("NxG or a cluster.yaml: a description, not measured.")] = None,
    link: Annotated[list[str] | None, optional("KIND=GBps:us[:DEVICES] of a described cluster; may repeat.")] = None,
    attention: Annotated[
        str | None, optional("NS:PS@HIDDEN of a described cluster: ns a token, ps a token squared.")
    ] = None,
    from_tables: Annotated[Path | None, optional("Folder of aiconfigurator's Parquet tables to read.")] = None,
    system: Annotated[str | None, optional("With --from-tables: the GPU, e.g. h200_sxm.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Make one of the profiles given.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds of silence after which a rank counts as hung.")] = 120,
    plot: Annotated[Path | None, optional("Also draw the fits: a page, and text on the screen.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the profile goes.")] = Path("profile.json"),
    as_json: Json = False,
) -> None:
    """Measure this machine and its links; or take a preset, describe a cluster, read published tables, merge profiles.

    Under torchrun or srun it joins that world, of any number of nodes. Outside such a world it also records the small
    embedded model's routing into traces/, unless that is there, so that moeplan solve has something to plan with.
    Ctrl-C keeps what was measured, and --resume goes on from there.

    --preset and --from-tables give the curves of one node; --cluster and --link say how many there are and what joins
    them. A link given replaces the measured one. inter=GBps:us:DEVICES is one that so many devices of a node share;
    GBps is what each has while all send: one card of 400 Gb/s for 8 devices is inter=6.25:5:8.

    \b
    Examples:
      moeplan profile --preset h200_sxm --cluster 2x8 --link inter=50:5
      srun moeplan profile --device cuda
      moeplan profile --quick
      moeplan profile --cluster 4x8 --link intra=450:3 --link inter=50:12
      moeplan profile --cluster 1x8 --link intra=450:3 --attention 71:23@2880
      moeplan profile --merge node.json net.json
      moeplan profile --from-tables systems/data --system h200_sxm
    """
    if preset == "list":
        _print_presets(as_json=as_json)
        return
    given: dict[str, object] = {
        "PROFILES": profiles,
        "--merge": merge,
        "--resume": resume,
        "--quick": quick,
        "--full": full,
    }
    given |= {"--ranks": ranks, "--device": device != "auto", "--link": link}
    given |= {"--preset": preset, "--from-tables": from_tables, "--system": system}
    given |= {"--cluster": cluster, "--attention": attention}
    check_flags(given, RULES)
    if not 1 <= timeout <= 86_400:
        raise UsageError(f"--timeout {timeout}; expected 1 to 86400 seconds")
    _check_files(profiles or (), output, plot)
    measured = not merge and (preset, from_tables, cluster) == (None, None, None)
    before = "" if resume else _before(output)
    if not measured and not merge and "measured" in before:
        raise UsageError(f"{output}: a profile ({before}) that would be lost; give -o another name, or remove it")
    if measured:
        from ...profilers.measure import measure_file
        from ...runtime.condensed_rows import CondensedRows

        grid: GridName = "quick" if quick else "full" if full else "default"
        with step_progress() as tell:
            file = measure_file(
                output,
                num_ranks=ranks,
                device=device,
                grid=grid,
                timeout_s=timeout,
                resume=resume,
                on_progress=tell,
                also=(CondensedRows(),),
            )
        if file.profile is None:  # not rank 0 of a launched world
            return
        result, notes = file.profile, [*file.notes]
    elif merge:
        from ...profilers.merge import merge_files

        merged = merge_files(profiles or ())
        result, notes = merged.profile, [*merged.notes]
    else:
        node = _node_curves(preset, from_tables, system or "")
        result, notes = _described(node, cluster, link or (), attention)
    path, picture = _saved(result, output, plot, measured=measured)
    notes += [f"replaced {output} ({before})"] * bool(before) + [f"pictures of the fits in {plot}"] * bool(plot)
    recorded = _record_embedded() if measured and result.complete else None
    if as_json:
        from ..report.profile import remarks

        files = {"profile": str(path), "traces": recorded, "notes": [*notes, *remarks(result)]}
        print_json(files | result.model_dump(mode="json"))
    else:
        _print(result, notes, path, picture, recorded)
    if not result.complete:
        end_interrupted(f"{path} holds what was measured until then")


def _check_files(profiles: Sequence[Path], output: Path, plot: Path | None) -> None:
    """Refuse a place for the profile or the page that cannot be written, or where another file is needed."""
    from ...files import check_target

    if output.resolve() in [path.resolve() for path in profiles]:
        raise UsageError(f"{output} would be overwritten, and is one of the profiles to merge; choose another with -o")
    if plot is not None:
        from ...profilers.measure import partial_path

        if plot.resolve() in [path.resolve() for path in (output, partial_path(output), *profiles)]:
            raise UsageError(
                f"--plot {plot} is where a profile is or goes; give the page a name of its own, like fits.html"
            )
    for target in (output, plot):
        if target is not None:
            check_target(target)


def _described(
    node: "Profile | None", cluster: str | None, links: Sequence[str], attention: str | None
) -> "tuple[Profile, list[str]]":
    """The profile of a cluster that is described, by the curves of one node where they are known, and notes on it."""
    from ...profilers.description import describe, on_cluster

    if node is None:
        described = describe(cluster or "", links, attention)
        return described, [*_unlinked(described.cluster)]
    result = on_cluster(node, cluster, links)
    replaced = len(node.series) - len(result.series)
    note = f"{replaced} curves are left out: the link that they crossed is as given"
    return result, [note] if replaced else []


def _unlinked(cluster: "Cluster") -> Iterator[str]:
    """A note on the links that a described cluster has, and that were not given."""
    sizes = {"intra": cluster.devices_per_node, "inter": cluster.num_nodes}
    if lacking := [kind for kind, size in sizes.items() if size > 1 and kind not in cluster.links]:
        flags = " ".join(f"--link {kind}=GBps:us" for kind in lacking)
        yield (
            f"link {' and '.join(lacking)} not given, and nothing is measured: no seconds of exchanges will be"
            f" predicted; give {flags}"
        )


def _saved(result: "Profile", output: Path, plot: Path | None, *, measured: bool) -> tuple[Path, list[str]]:
    """Save a profile and the page of its fits; returns the profile's path, and its fits as text for the screen."""
    if plot is None:
        return _written(result, output, measured=measured), []
    from ..report.profile_picture import text_picture, write_profile_page

    picture = [*text_picture(result, console().width)]  # a fit that cannot be drawn leaves nothing behind
    path = _written(result, output, measured=measured)
    try:
        write_profile_page(result, plot)
    except MoeplanError as error:
        raise type(error)(f"{path} is written, the page of --plot is not: {error}") from error
    return path, picture


def _written(result: "Profile", output: Path, *, measured: bool) -> Path:
    """Path of a profile, written: an interrupted one that was measured goes beside an older file."""
    if measured:
        from ...profilers.measure import save_measured

        return save_measured(result, output)
    from ...profilers.profile import save

    save(result, output)
    return output


def _before(path: Path) -> str:
    """The profile that another one replaces, in a few words; empty where there is none."""
    from ...profilers.profile import load

    if not path.exists():
        return ""
    try:
        old = load(path)
    except MoeplanError:
        return "no profile"
    return f"{' and '.join(dict.fromkeys(origin.kind for origin in old.origins))}, of {old.cluster}"


def _node_curves(preset: str | None, tables: Path | None, system: str) -> "Profile | None":
    """The curves of one node, of a preset or of published tables; None without either."""
    if preset is not None:
        from ...profilers.presets import load_preset

        return load_preset(preset)
    if tables is None:
        return None
    from ...profilers.tables import read_tables

    return read_tables(tables, system)


def _print_presets(*, as_json: bool) -> None:
    """Print the presets and their contents."""
    from ..report.profile import preset_rows, presets_report

    if as_json:
        print_json({"presets": preset_rows()})
    else:
        presets_report(preset_rows(), console())


def _print(profile: "Profile", notes: Sequence[str], path: Path, picture: Sequence[str], recorded: str | None) -> None:
    """Print a saved profile, the place of the toy model's routing, if recorded, and the next command."""
    from ..report.profile import profile_report

    screen = console()
    for note in notes:
        screen.print(f"NOTE      {note}")
    if picture:
        print(*picture, sep="\n")
    profile_report(profile, path, screen)
    if recorded is not None:
        screen.print(
            f"NOTE      {recorded}/ was missing: it now holds the routing of moeplan's small embedded TOY model, to try"
            " things out with; record your own model before you plan for it"
        )
    flag = "" if path == Path("profile.json") else f" --profile {path}"
    trace = "" if Path("traces").exists() else " --trace DIR"
    if trace:
        print("without a trace: moeplan trace import FILES (counts), or moeplan trace record MODEL --text FILE")
    print(f"next: moeplan solve{trace}{flag}")


def _record_embedded() -> str | None:
    """Record the embedded model into traces/ where that is missing and nobody launched this process."""
    from ...profilers.world.launch import found_launch

    if Path("traces").exists() or found_launch() is not None:
        return None
    from ..demo.text import record_embedded, record_text

    with progress() as say:
        say("recording the embedded model")
        record_embedded(record_text(), "traces")
    return "traces"
