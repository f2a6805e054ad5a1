"""Screen of `moeplan compare`."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...errors import printable
from ..compare.comparison import Compared, Comparison
from ..document import Section, Text, to_console
from ..evaluate.metrics import METRICS
from ..figures import contender_table, find, headlines, legend, megabytes
from .answer import gain_words, short_of, standing
from .remarks import COPIES, more_bytes, slower_exchange

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["as_dict", "compare_report", "compare_sections"]

MOST_REMARKS = 5
RULES = {  # what engines do
    "even": "shared alike (vLLM)",
    "nearest": "the token's own device, else its node, else all alike",
    "static": "a fixed one for each device: its own, else on its node, else a fair choice (SGLang)",
    "round_robin": "in turn, each device from an offset of its own (TensorRT-LLM)",
}


def compare_report(comparison: Comparison, console: "Console", *, verbose: bool = False) -> None:
    """Print which plans pay here, all of them beside today, and what qualifies that."""
    to_console(compare_sections(comparison), console, verbose=verbose)


def compare_sections(comparison: Comparison) -> list[Section]:
    """The document of a comparison."""
    part, first = comparison.part, comparison.compared[0]
    judged, today = first.verdict.metric, first.verdict.against
    remarks = [*_remarks(comparison)]
    said = [
        *remarks[:MOST_REMARKS],
        *([f"{len(remarks) - MOST_REMARKS} more: --verbose"] * (len(remarks) > MOST_REMARKS)),
    ]
    names = [name for name in METRICS if METRICS[name].column]
    every = contender_table(part, names, today=today, ranged=True)
    return [
        Section("Answer", (Text((*_answers(comparison), _on(comparison))),)),
        Section("Beside today", (contender_table(part, headlines(part, judged), today=today, judged=judged),)),
        Section("Remarks", (Text(tuple(said)),) if said else ()),
        Section("More remarks", (Text(tuple(remarks[MOST_REMARKS:])),) if len(remarks) > MOST_REMARKS else (), True),
        Section("All figures (95 % intervals)", (every, Text(("", *legend(part, names)))), verbose=True),
    ]


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """The comparison as a JSON object."""
    return {
        "trace": {"path": comparison.trace, "sha256": comparison.trace_sha256},
        "cluster": str(comparison.cluster),
        "unit": comparison.unit,
        "resampled": comparison.resampled,
        "samples_per_step": comparison.samples_per_step,
        "num_fitted_left_out": 0 if comparison.seen else comparison.num_fitted,
        "judged_on_fitted": comparison.seen,
        "part": comparison.part.model_dump(mode="json"),
        "seconds": None if comparison.seconds is None else comparison.seconds.model_dump(mode="json"),
        "replica_rule": comparison.replica_rule,
        "copies_between": {label: copies_DD.tolist() for label, copies_DD in comparison.between.items()},
        "copy_bytes": comparison.copy_bytes,
        "plans": [_plan(one) for one in comparison.compared],
        "no_longer_pay": comparison.failing,
    }


def _plan(one: Compared) -> dict[str, Any]:
    return {
        "path": one.path,
        "plan_sha256": one.plan.plan_sha256,
        "strategies": list(one.plan.strategies),
        "contender": one.label,
        "verdict": one.verdict.model_dump(mode="json"),
        "gain_when_solved": None if one.claimed is None else one.claimed.model_dump(mode="json"),
        "gain_when_solved_over_same": one.gain_over_same,
        "against_first": None if one.against_first is None else one.against_first.model_dump(mode="json"),
        "moves_from_first": None if one.moves is None else asdict(one.moves),
    }


def _on(comparison: Comparison) -> str:
    """On what the plans are judged."""
    part, unit = comparison.part, comparison.unit
    seen = "fitted" if comparison.seen else "unseen"
    steps = f"{part.num_steps} complete step{'s' * (part.num_steps != 1)}"
    dropped = f" ({part.dropped_samples} trailing {unit}s dropped)" if part.dropped_samples else ""
    return (
        f"on {printable(comparison.trace)}: {part.num_samples:,} {seen} {unit}s, {part.num_tokens:,} tokens in"
        f" {steps}{dropped}; cluster {comparison.cluster}"
    )


def _answers(comparison: Comparison) -> Iterator[str]:
    """Whether each plan pays."""
    for one in comparison.compared:
        stands = standing(one.verdict, paid_when_solved=one.paid_when_solved)
        gain = gain_words(one.verdict, comparison.part, of=one.label)
        yield f"{printable(one.path)} {stands}: {gain}{short_of(one.verdict) if one.verdict.value == 'none' else ''}"


def _remarks(comparison: Comparison) -> Iterator[str]:
    """Remarks that qualify the answers, the most important first."""
    part = comparison.part
    if comparison.seen:
        yield f"all {comparison.unit}s were fitted by these plans: expect less on others"
    elif comparison.num_fitted:
        yield f"{comparison.num_fitted} {comparison.unit}s that a plan was fitted to are left out"
    if comparison.replica_rule is not None:
        yield f"replicas: {RULES[comparison.replica_rule]}, in all plans and baselines"
    for one in comparison.compared:
        if one.verdict.metric in COPIES:
            ours, base = find(part, one.label), find(part, one.verdict.against)
            yield from (
                f"{printable(one.path)}: {line}" for line in (*slower_exchange(ours, base), *more_bytes(ours, base))
            )
        if (then := _claim(one)) is not None:
            yield f"{printable(one.path)}: {then}"
    for one in comparison.compared:
        if one.against_first is not None:
            gain = gain_words(one.against_first, part, of=one.label)
            yield f"{printable(one.path)}: {gain}{_moved(one)}"


def _moved(one: Compared) -> str:
    """Number of experts, and their bytes, that move to replace the first plan."""
    if one.moves is None:
        return ""
    size = "" if one.moves.num_bytes is None else f" ({megabytes(one.moves.num_bytes)} MB)"
    return f"; to get there {one.moves.experts:,} of {one.moves.held:,} experts move{size}"


def _claim(one: Compared) -> str | None:
    """The gain when it was solved; None where that was not judged alike."""
    evaluation, solved = one.plan.evaluation, one.plan.verdict
    if one.claimed is None or solved is None or evaluation is None:
        return None
    where = "" if evaluation.held_out else ", on the samples it was fitted to"
    return f"{gain_words(solved, evaluation.judging)} when it was solved{where}"
