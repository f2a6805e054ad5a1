"""Screen and page of `moeplan compare`.

Legend: D devices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ...errors import printable
from ...runtime.exports.engine import listed
from ..compare import Comparison
from ..document import Column, Section, Table, Text, to_console, write_page
from ..evaluate.metrics import METRICS
from ..evaluate.price import STEP
from ..evaluate.split_bounds import SplitBound
from ..figures import bytes_text, contender_of, percent
from .answer import gain_words, short_of, step_words
from .pictures import load_section, time_section
from .remarks import by_engine, copies_remarks, fill_words, judged_sections, rule_words, scaled_up
from .traffic import traffic_section

WORST = 5  # layers shown of a plan


def compare_report(comparison: Comparison, console: Console, *, verbose: bool = False) -> None:
    """Print which plans pay here, all of them beside today, and remarks."""
    to_console(_sections(comparison), console, verbose=verbose)


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """The comparison as a JSON object."""
    return {
        "trace": {"path": comparison.trace, "sha256": comparison.trace_sha256},
        "cluster": str(comparison.cluster),
        "profile_cluster": comparison.profiled and str(comparison.profiled),
        "unit": comparison.unit,
        "resampled": comparison.resampled,
        "step": comparison.size and asdict(comparison.size),
        "num_fitted_left_out": 0 if comparison.seen else comparison.num_fitted,
        "judged_on_fitted": comparison.seen,
        "part": comparison.part.model_dump(mode="json"),
        "seconds": comparison.seconds and comparison.seconds.model_dump(mode="json"),
        "replica_rule": comparison.replica_rule,
        "waterfill": comparison.fills,
        "split_bounds": {label: [asdict(bound) for bound in bounds] for label, bounds in comparison.bounds.items()},
        "copies_between": {label: copies_DD.tolist() for label, copies_DD in comparison.between.items()},
        "copy_bytes": comparison.copy_bytes.get(comparison.compared[0].verdict.against),
        "plans": [
            {
                "path": row.path,
                "plan_sha256": row.plan.plan_sha256,
                "strategies": list(row.plan.strategies),
                "contender": row.label,
                "copy_bytes": comparison.copy_bytes.get(row.label),
                "verdict": row.verdict.model_dump(mode="json"),
                "gain_when_solved": row.claimed and row.claimed.model_dump(mode="json"),
                "gain_when_solved_over_same": row.gain_over_same,
                "against_first": row.against_first and row.against_first.model_dump(mode="json"),
                "moves_from_first": row.moves and asdict(row.moves),
            }
            for row in comparison.compared
        ],
        "no_longer_pay": comparison.failing,
    }


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write a comparison as a page, with pictures of the plans beside today; errors as in `write_page`."""
    part, (first, *_) = comparison.part, comparison.compared
    labels, today = [row.label for row in comparison.compared], first.verdict.against
    answer, table, *rest = _sections(comparison)
    pictures = [
        load_section(part, comparison.tallies, today, labels),
        time_section(part, today, whole=all(row.plan.decisions.pipeline is None for row in comparison.compared)),
        traffic_section(part, comparison.tallies, [today, *labels], today, comparison.cluster),
    ]
    text = f"{first.plan.model.name} on {comparison.cluster}"
    sections = [replace(answer, title=""), table, *filter(None, pictures), *rest]
    write_page(path, "Plans compared", text, sections)


def _sections(comparison: Comparison) -> list[Section]:
    """The document of a comparison."""
    verdict = comparison.compared[0].verdict
    answer = Section("Answer", (Text(tuple(_answers(comparison))),))
    sections = judged_sections(
        comparison.part, verdict, [*_doubts(comparison)], [*_remarks(comparison)], [*METRICS], whole=True
    )
    return [answer, *sections, *(_bounds(label, bounds) for label, bounds in comparison.bounds.items())]


def _bounds(label: str, bounds: Sequence[SplitBound]) -> Section:
    """The layers of a plan that are furthest above the mean, with the experts that bound them."""
    worst = sorted(bounds, key=lambda bound: -bound.split)[:WORST]
    sets = [
        f"{listed([*bound.experts])} on {bound.devices} ({percent(bound.often)})" if bound.experts else ""
        for bound in worst
    ]
    columns = [
        Column("layer", [str(bound.layer) for bound in worst]),
        Column("exact split", [f"{bound.split:.3f}" for bound in worst]),
        Column("shared alike", [f"{bound.even:.3f}" for bound in worst]),
        Column("at the mean", [percent(bound.at_mean) for bound in worst]),
        Column("experts that bound most often, on devices", sets),
    ]
    text = (
        "busiest device over the mean of all devices, mean over steps. No split is below what some experts have per"
        " device that holds one of them: the exact split reaches that in every step."
    )
    title = f"Bounds: {printable(label)}, the {len(worst)} least even of {len(bounds)} layers"
    return Section(title, (Table(columns), Text.of(text)), verbose=True)


def _answers(comparison: Comparison) -> Iterator[str]:
    """The answer for every plan: whether it pays, and the samples it is judged on."""
    for row in comparison.compared:
        stands, solved_for = "no longer pays" if row.paid_when_solved else "does not pay", row.size_when_solved
        if row.paid_when_solved and solved_for not in (None, comparison.size):
            stands = f"does not pay at this step size (solved for {solved_for.number:,} {solved_for.unit} per step)"
        if row.verdict.value == "benefit":
            stands = "pays"
        elif row.verdict.gain.low is None:
            stands = "not shown to pay (one step or sample shows nothing)"
        gain = gain_words(row.verdict, comparison.part, of=row.label)
        yield f"{printable(row.path)} {stands}: {gain}{short_of(row.verdict) if row.verdict.value == 'none' else ''}"
    part, unit = comparison.part, comparison.unit
    steps = f"{part.num_steps} complete step{'s' * (part.num_steps != 1)}"
    dropped = f" ({part.dropped_samples} trailing {unit}s dropped)" if part.dropped_samples else ""
    kind = "fitted " if comparison.seen else "unseen " if comparison.num_fitted else ""
    whole = f"{part.num_samples - part.dropped_samples:,} of " if part.dropped_samples else ""
    yield (
        f"on {printable(comparison.trace)}: {whole}{part.num_samples:,} {kind}{unit}s, {part.num_tokens:,} tokens;"
        f" {step_words(comparison, part)}, {steps}{dropped}; cluster {comparison.cluster}"
    )


def _doubts(comparison: Comparison) -> Iterator[str]:
    """Remarks that qualify the answers, which no screen leaves out."""
    part = comparison.part
    if comparison.seen:
        yield f"all {comparison.unit}s were fitted by these plans: expect less on others"
    elif comparison.num_fitted:
        yield f"{comparison.num_fitted} {comparison.unit}s that a plan was fitted to are left out"
    if comparison.profiled is not None:
        yield (
            f"the profile is of {comparison.profiled}, not {comparison.cluster}: its curves and links are taken as they"
            " are, links that it lacks from the first plan"
        )
    yield from _timed_before(comparison)
    if scaled := scaled_up(part):
        yield scaled
    if comparison.replica_rule is not None:
        yield f"{rule_words(comparison.replica_rule)} in all plans and baselines"
    else:
        yield from (f"{printable(row.path)}: {words}" for row in comparison.compared if (words := by_engine(row.plan)))
    if comparison.fills:
        yield fill_words(part)


def _timed_before(comparison: Comparison) -> Iterator[str]:
    """Plans that were solved by seconds of whole steps, where these are not known here."""
    for row in comparison.compared:
        solved, source = row.plan.verdict, row.plan.inputs.profile
        if solved is not None and solved.metric == STEP != row.verdict.metric and source is not None:
            known = f" ({printable(source.path)})" if source.path else ""
            yield f"{printable(row.path)} was solved by seconds of whole steps{known}: give --profile for them"


def _remarks(comparison: Comparison) -> Iterator[str]:
    """Further remarks: exchanges, the gains when solved, and how the plans stand to the first."""
    part = comparison.part
    for row in comparison.compared:
        ours, base = contender_of(part, row.label), contender_of(part, row.verdict.against)
        yield from (f"{printable(row.path)}: {line}" for line in copies_remarks(row.verdict, ours, base))
        solved, evaluation = row.plan.verdict, row.plan.evaluation
        if row.claimed is not None and solved is not None and evaluation is not None:  # it was judged alike
            where = "" if evaluation.held_out else ", on the samples it was fitted to"
            yield f"{printable(row.path)}: {gain_words(solved, evaluation.judging)} when it was solved{where}"
    for row in comparison.compared:
        if row.against_first is not None:
            words = f"{printable(row.path)}: {gain_words(row.against_first, part, of=row.label)}"
            if (moves := row.moves) is not None:
                size = "" if moves.num_bytes is None else f" ({bytes_text(moves.num_bytes)})"
                words += f"; to get there {moves.experts:,} of {moves.held:,} slots take another expert{size}"
            yield words
