"""What `moeplan compare` prints."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...errors import printable
from ...runtime.plan import Contender
from ..reports.remarks import COPIES, LITTLE, gain_words, slower_exchange
from ..tables.contenders import contender_table, legend, megabytes
from ..tables.part import find
from ..tables.seconds import print_seconds_table
from .comparison import Compared, Comparison

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["as_dict", "compare_report"]

BYTES = ("intra_bytes", "inter_bytes", "kv_bytes")
RULES = {  # what engines do
    "even": "shared alike (vLLM)",
    "nearest": "the token's own device, else its node, else all alike",
    "static": "a fixed one for each device: its own, else on its node, else a fair choice (SGLang)",
    "round_robin": "in turn, each device from an offset of its own (TensorRT-LLM)",
}


def compare_report(found: Comparison, console: "Console") -> None:
    """What was read, the plans and their baselines side by side, and what each gains."""
    part, several_nodes = found.part, found.cluster.num_nodes > 1
    console.print(f"trace     {printable(found.trace)}  {part.num_tokens:,} tokens, {part.num_samples} {found.unit}s")
    if found.replica_rule is not None:
        console.print(f"replicas  {RULES[found.replica_rule]}, in all plans and baselines")
    dropped = f", {part.dropped_samples} {found.unit}(s) fill none" if part.dropped_samples else ""
    over = ", which all intervals are over" if found.resampled == "step" != found.unit else ""
    console.print(f"cluster   {found.cluster}; {part.num_steps} step(s){over}{dropped}")
    if found.seen:
        console.print(f"ALL {found.unit}s were fitted by these plans: expect less on others")
    elif found.num_fitted:
        console.print(f"left out  {found.num_fitted} {found.unit}s that a plan was fitted to")
    console.print()
    console.print(contender_table(part, found.unit + "s", several_nodes=several_nodes))
    console.print(legend(part, several_nodes=several_nodes))
    console.print()
    if found.seconds is not None and found.seconds.sources:
        print_seconds_table(part, console)
        console.print()
    for line in _gains(found):
        console.print(line)


def as_dict(found: Comparison) -> dict[str, Any]:
    """The comparison as a JSON object."""
    return {
        "trace": {"path": found.trace, "sha256": found.trace_sha256},
        "cluster": str(found.cluster),
        "unit": found.unit,
        "resampled": found.resampled,
        "samples_per_step": found.samples_per_step,
        "num_fitted_left_out": 0 if found.seen else found.num_fitted,
        "judged_on_fitted": found.seen,
        "part": found.part.model_dump(mode="json"),
        "seconds": None if found.seconds is None else found.seconds.model_dump(mode="json"),
        "replica_rule": found.replica_rule,
        "copies_between": {label: copies_DD.tolist() for label, copies_DD in found.between.items()},
        "copy_bytes": found.copy_bytes,
        "plans": [_plan(one) for one in found.compared],
        "no_longer_pay": found.failing,
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


def _gains(found: Comparison) -> Iterable[str]:
    for one in found.compared:
        gain = gain_words(one.verdict, found.part)
        yield f"{printable(one.path)} {_standing(one)}: {gain} than {_named(one.verdict.against)}{_claim(one)}"
        if one.verdict.value == "benefit" and one.verdict.metric in COPIES:
            yield from _prices(find(found.part, one.label), [find(found.part, label) for label in one.baselines])
    for one in found.compared:
        if one.against_first is not None:
            gain = gain_words(one.against_first, found.part)
            yield f"{printable(one.path)}: {gain} than {_named(one.against_first.against)}{_moved(one)}"


def _prices(plan: Contender, baselines: Iterable[Contender]) -> Iterable[str]:
    """What fewer copies cost all the same: seconds and bytes, beside the first baseline that takes fewer of either."""
    for base in baselines:
        if said := [*slower_exchange(plan, base), *_more_bytes(plan, base)]:
            yield from said
            return


def _more_bytes(plan: Contender, other: Contender) -> Iterable[str]:
    """That K and V are more than a plan's fewer copies save, where that is known."""
    if not {"kv_bytes", "intra_bytes"} <= plan.metrics.keys():
        return
    ours, theirs = (sum(one.metrics[name].value for name in BYTES if name in one.metrics) for one in (plan, other))
    if ours > theirs * (1 + LITTLE):
        against = f"{megabytes(theirs)} of {_named(other.label)}"
        yield f"BUT it moves {megabytes(ours)} MB a step with K and V, against {against}: fewer copies, not fewer bytes"


def _moved(one: Compared) -> str:
    """What it takes to replace the first plan."""
    if one.moves is None:
        return ""
    size = "" if one.moves.num_bytes is None else f" ({megabytes(one.moves.num_bytes)} MB)"
    return f"; to get there {one.moves.experts:,} of {one.moves.held:,} experts move{size}"


def _standing(one: Compared) -> str:
    if one.verdict.value == "benefit":
        return "pays"
    if one.verdict.gain.low is None:
        return "NOT SHOWN TO PAY (one step or sample shows nothing)"
    return "NO LONGER PAYS" if _paid(one) else "DOES NOT PAY"


def _paid(one: Compared) -> bool:
    """Whether it was solved with a benefit, also over what it is held against now if that was judged beside it."""
    solved = one.plan.verdict
    return solved is not None and solved.value == "benefit" and (one.gain_over_same is None or one.gain_over_same > 0)


def _claim(one: Compared) -> str:
    """The gain when it was solved, worded as the verdict; and what a sample policy must gain."""
    words, evaluation, solved = "", one.plan.evaluation, one.plan.verdict
    if one.claimed is not None and solved is not None and evaluation is not None:
        if solved.against == one.verdict.against:
            words = f"; {gain_words(solved, evaluation.judging)}"
        elif one.gain_over_same is not None and one.verdict.metric in COPIES:
            words = f"; {abs(one.gain_over_same):.3f} {'more' if one.gain_over_same < 0 else 'fewer'}"
        else:
            words = f"; {gain_words(solved, evaluation.judging)} than {_named(solved.against)}"
        words += " when it was solved" + ("" if evaluation.held_out else ", on the samples it was fitted to")
    if one.verdict.at_least and one.verdict.value == "none":
        words += f"; up to {one.verdict.at_least:.0%} does not pay for moving samples"
    return words


def _named(label: str) -> str:
    """A contender's label as tables have it."""
    name, _, dispatch_model = label.rpartition("/")
    return f"{printable(name)}, {dispatch_model}"
