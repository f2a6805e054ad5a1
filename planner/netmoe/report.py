"""What `solve` and `show` print of a sample policy below the tables."""

from collections.abc import Iterable

from pydantic import ValidationError

from ...errors import InputError
from ...runtime.plan import Part, Plan
from ..part import find, value
from .policy import SamplePolicyOptions

__all__ = ["sample_policy_lines"]

METRICS = {
    "inter_bytes": "bytes between nodes",
    "node_copies": "copies between nodes",
    "device_copies": "copies between devices",
}


def sample_policy_lines(plan: Plan, part: Part) -> Iterable[str]:
    """The locality index, the share saved beside the oracle's, what moves, what a copy is, and where it costs time."""
    decision = plan.decisions.sample_policy
    assert decision is not None
    try:
        options = SamplePolicyOptions.model_validate(dict(plan.options.get("sample_policy", {})))
    except ValidationError as error:
        raise InputError(f"options.sample_policy: {error.error_count()} values missing or wrong") from error
    between = "nodes" if plan.cluster.num_nodes > 1 else "devices"
    yield (
        f"locality  no homes save more than {options.locality_index:.1%} of the copies between {between}: what the"
        " samples' preferences allow under this placement"
    )
    yield from _saved(plan, part)
    ours = find(part, "plan/migrating")
    yield (
        f"a combine delivers {value(ours, 'samples_moved'):.0%} of the samples to another device; their labels and"
        " positions go along"
    )
    if options.copies == "pairs":
        yield (
            "the trace holds counts only: a copy is a token-expert pair, where engines send a device one copy a token;"
            " contexts are taken as whole sequences"
        )
    yield from _slower(plan, part)


def _saved(plan: Plan, part: Part) -> Iterable[str]:
    """Relative gains on every contender's own, the plan's beside the oracle's; under a base, either alone."""
    metric = "device_copies"
    if plan.cluster.num_nodes > 1:
        metric = "inter_bytes" if "inter_bytes" in part.contenders[0].metrics else "node_copies"
    base = find(part, "contiguous/standard" if plan.decisions.placement is None else "base/standard")
    saved = {
        contender.label: 1 - value(contender, metric) / value(base, metric) if value(base, metric) else 0.0
        for contender in part.contenders
    }
    what = f"{METRICS[metric]} of {base.name}, {base.dispatch_model}"
    yield (
        f"saved     {saved['plan/migrating']:.1%} of the {what}; {saved['oracle/migrating']:.1%} if the next layer"
        " were known"
    )
    if base.name == "base":
        start = value(find(part, "contiguous/standard"), metric)
        alone, moved, both = (
            1 - value(find(part, label), metric) / start if start else 0.0
            for label in ("base/standard", "contiguous/migrating", "plan/migrating")
        )
        yield (
            f"jointly   of contiguous, standard the placement alone saves {alone:.1%}, re-homing alone {moved:.1%},"
            f" both {both:.1%}"
        )


def _slower(plan: Plan, part: Part) -> Iterable[str]:
    """Said where fewer copies take more time, because the busiest port carries more."""
    ours = find(part, "plan/migrating")
    base = find(part, "contiguous/standard" if plan.decisions.placement is None else "base/standard")
    if not all(name in ours.metrics and name in base.metrics for name in ("dispatch_s", "combine_s")):
        return
    mine, theirs = (value(one, "dispatch_s") + value(one, "combine_s") for one in (ours, base))
    if mine > theirs:
        yield (
            f"COSTS TIME: dispatch and combine take {mine / theirs - 1:.1%} longer, since the busiest port carries more"
            " although all together carry less (try --method bottleneck, or samples of one length)"
        )
