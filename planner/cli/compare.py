"""`moeplan compare`: hold plans against one another on any trace."""

from pathlib import Path
from typing import Annotated

import typer

from ...errors import NoBenefitError
from .flags import Json, Phases, ReplicaRule, Verbose, optional, phases
from .screen import console, print_json, progress


def compare(
    plans: Annotated[list[Path], typer.Argument(help="The plans; gains are against the first, too.")],
    trace: Annotated[str, typer.Option(help="A trace of their model: a directory, a file or a URI.")] = "traces",
    profile: Annotated[Path | None, optional("The profile; profile.json where there is one.")] = None,
    phase: Phases = None,
    samples_per_step: Annotated[
        int | None, optional("Samples of a step; as the first plan was judged.", min=1, max=2**31 - 1)
    ] = None,
    replica_rule: Annotated[
        ReplicaRule | None, optional("As an engine chooses replicas; each plan's own rule.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the intervals.", min=0)] = 0,
    output: Annotated[
        Path | None, optional("The bytes between all pairs of devices as a page (.html).", "-o", "--output")
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Evaluate plans side by side on a trace they were not made from, each against today and the first.

    Today is contiguous experts, one slot each, standard dispatch, whole layers, samples that stay. Exits with 8 when at
    least one of the plans does not pay there: the 95 % interval of its gain over today is not above 0 (of a sample
    policy that is not judged by whole steps: above 2 % of today). stderr names all that do not; gains over
    the first plan decide nothing. To ask about one plan alone, name it alone.

    \b
    Examples:
      moeplan compare plan.json --trace new-traces
      moeplan compare plan.json other.json --trace new-traces -o bytes.html
      moeplan compare eplb.json --trace new-traces --replica-rule static
    """
    from ..compare import compare as compared
    from ..document import check_page
    from ..report.compare import as_dict, compare_report, write_matrices
    from ..request import profile_for

    if output is not None:
        check_page(output, "; expected a page of the bytes between devices")
    with progress() as say:
        comparison = compared(
            plans,
            trace,
            profile=profile_for(profile),
            phases=phases(phase),
            samples_per_step=samples_per_step,
            replica_rule=replica_rule,
            between=output is not None,
            seed=seed,
            on_progress=say,
        )
    if output is not None:
        write_matrices(comparison, output)
    if as_json:
        print_json(as_dict(comparison))
    else:
        compare_report(comparison, console(), verbose=verbose)
        if output is not None:
            print(f"wrote     {output}")
    if comparison.failing:
        names = ", ".join(comparison.failing)
        raise NoBenefitError(f"{trace} shows no benefit of {names}; {comparison.advice}")
