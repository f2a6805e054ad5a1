"""What `solve` and `show` print of a sample policy below the tables."""

from collections.abc import Iterable

from pydantic import ValidationError

from ...errors import InputError
from ...runtime.plan import Part, Plan
from ..part import find, value
from .policy import SamplePolicyOptions

__all__ = ["SAVED", "sample_policy_lines"]

SAVED = {
    "inter_bytes": "bytes between nodes",
    "node_copies": "copies between nodes",
    "device_copies": "copies between devices",
    "exchange_s": "seconds of dispatch and combine",
}
BLIND = "unpredicted/migrating"


def sample_policy_lines(plan: Plan, part: Part) -> Iterable[str]:
    """The locality index, shares saved with and without a prediction, methods tried, moves, what a copy is, time."""
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
    yield from _saved(plan, part, pairs=options.copies == "pairs")
    if options.tried_s:
        found = ", ".join(f"{method} {seconds * 1e3:.4g}" for method, seconds in options.tried_s.items())
        yield f"tried     {found} ms of timed parts a fitted step: {decision.method} is the plan's"
    yield (
        f"a combine delivers {value(find(part, 'plan/migrating'), 'samples_moved'):.0%} of the samples to another"
        " device; no figure holds the solves, or the labels and positions that go along"
    )
    if options.copies == "pairs":
        yield (
            "the trace holds counts only: a copy is a token-expert pair, where engines send a device one copy a token;"
            " contexts are taken as whole sequences"
        )
    yield from _exchanges(plan, part)


def _saved(plan: Plan, part: Part, *, pairs: bool) -> Iterable[str]:
    """Relative gains on every contender's own, the plan's beside the oracle's; under a base, either alone."""
    metric = "device_copies"
    if plan.cluster.num_nodes > 1:
        metric = "inter_bytes" if "inter_bytes" in part.contenders[0].metrics else "node_copies"
    base = find(part, "contiguous/standard" if plan.decisions.placement is None else "base/standard")
    saved = {
        contender.label: 1 - value(contender, metric) / value(base, metric) if value(base, metric) else 0.0
        for contender in part.contenders
    }
    blind = f"{saved[BLIND]:.1%} without a prediction, " if BLIND in saved else ""
    yield (
        f"saved     {saved['plan/migrating']:z.1%} of the {SAVED[metric]} of {base.name}, {base.dispatch_model}:"
        f" {blind}{saved['oracle/migrating']:.1%} if the next layer were known"
    )
    if metric != "node_copies" and plan.cluster.num_nodes > 1 and not pairs:
        once = 1 - value(find(part, "plan/migrating"), "node_copies") / max(value(base, "node_copies"), 1e-9)
        yield f"where a dispatch sends a node one copy a token, for all its devices, {once:.1%} are saved"
    if base.name == "base":
        start = value(find(part, "contiguous/standard"), metric)
        alone, moved, both = (
            1 - value(find(part, label), metric) / start if start else 0.0
            for label in ("base/standard", "contiguous/migrating", "plan/migrating")
        )
        yield (
            f"jointly   of contiguous, standard the placement alone saves {alone:z.1%}, re-homing alone {moved:z.1%},"
            f" both {both:z.1%}"
        )


def _exchanges(plan: Plan, part: Part) -> Iterable[str]:
    """What becomes of the seconds of both exchanges: fewer copies take more where the busiest port carries more."""
    ours = find(part, "plan/migrating")
    base = find(part, "contiguous/standard" if plan.decisions.placement is None else "base/standard")
    if not all("exchange_s" in one.metrics for one in (ours, base)):
        return
    mine, theirs = (value(one, "exchange_s") for one in (ours, base))
    if mine > theirs:
        yield (
            f"COSTS TIME: dispatch and combine take {mine / theirs - 1:.1%} longer, since the busiest port carries more"
            " although all together carry less (without --method, the fastest of several is taken)"
        )
    elif theirs:
        yield f"dispatch and combine take {1 - mine / theirs:.1%} less time: the busiest port carries less"
