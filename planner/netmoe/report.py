"""What `solve` and `show` print of a sample policy below the tables."""

from collections.abc import Iterable

from ...runtime.plan import Part, Plan
from ...solvers.cost import inter_ratio
from ..options import parsed
from ..tables.part import find, value
from ..tables.seconds import TimeUnit
from .policy import SamplePolicyOptions

__all__ = ["SAVED", "dealt_lines", "sample_policy_lines"]

SAVED = {
    "inter_bytes": "bytes between nodes",
    "node_copies": "copies between nodes",
    "device_copies": "copies between devices",
    "exchange_s": "seconds of dispatch and combine",
}
BLIND = "unpredicted/migrating"
TIMED = ("exchange_s", "step_s")


def sample_policy_lines(plan: Plan, part: Part) -> Iterable[str]:
    """The locality index, shares saved with and without a prediction, costs, methods tried, moves, copies, time."""
    decision = plan.decisions.sample_policy
    assert decision is not None
    options = _options(plan)
    between = "nodes" if plan.cluster.num_nodes > 1 else "devices"
    yield (
        f"locality  no homes save more than {options.locality_index:.1%} of the copies between {between}: what the"
        " samples' preferences allow under this placement"
    )
    yield from _saved(plan, part, pairs=options.copies == "pairs")
    if plan.cluster.num_nodes > 1 and plan.outcome["sample_policy"].objective.name != "exchange_s":
        known = {"intra", "inter"} <= set(plan.cluster.links)
        by = "by their links' seconds a byte" if known else "no links of both kinds are given"
        yield f"cost      a copy between nodes counts as {inter_ratio(plan.cluster):.3g} inside one ({by})"
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


def dealt_lines(plan: Plan, part: Part) -> Iterable[str]:
    """What of a verdict on seconds a data loader gives that deals samples by length, and whether it does as well."""
    verdict, over = plan.verdict, _options(plan).over_dealt
    if verdict is None or verdict.metric not in TIMED or over is None:
        return
    dealt, base = (value(find(part, label), verdict.metric) for label in ("dealt/standard", verdict.against))
    share = 1 - dealt / base if base else 0.0
    yield f"of this, dealing samples by length alone gives {share:z.1%}: once a step, by a data loader, without moves"
    if over.low is not None and over.low <= verdict.at_least * dealt:
        more = f"{abs(over.value) / dealt if dealt else 0.0:.1%} {'less' if over.value >= 0 else 'more'}"
        yield f"DEALING BY LENGTH DOES AS WELL: the plan takes {more} than that, no sure gain that pays for its moves"


def _options(plan: Plan) -> SamplePolicyOptions:
    return parsed(SamplePolicyOptions, dict(plan.options.get("sample_policy", {})), "sample_policy")


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
        yield from _jointly(part, [metric, *(["exchange_s"] if "exchange_s" in base.metrics else [])])


def _jointly(part: Part, metrics: list[str]) -> Iterable[str]:
    """What the placement alone, re-homing alone and both save of contiguous experts and homes."""
    for metric in metrics:
        start = value(find(part, "contiguous/standard"), metric)
        alone, moved, both = (
            1 - value(find(part, label), metric) / start if start else 0.0
            for label in ("base/standard", "contiguous/migrating", "plan/migrating")
        )
        yield (
            f"jointly   of the {SAVED[metric]} of contiguous, standard the placement alone saves {alone:z.1%},"
            f" re-homing alone {moved:z.1%}, both {both:z.1%}"
        )


def _exchanges(plan: Plan, part: Part) -> Iterable[str]:
    """What becomes of the seconds of both exchanges: fewer copies take more where the busiest port carries more."""
    ours = find(part, "plan/migrating")
    base = find(part, "contiguous/standard" if plan.decisions.placement is None else "base/standard")
    if not all("exchange_s" in one.metrics for one in (ours, base)):
        return
    mine, theirs = (value(one, "exchange_s") for one in (ours, base))
    unit = TimeUnit.of(part)
    summed = f"{unit.text(mine)} {unit.name} a step, {unit.text(theirs)} of {base.name}, {base.dispatch_model}"
    if mine > theirs:
        hint = "" if _options(plan).tried_s else " (without --method, the fastest of several is taken)"
        yield (
            f"COSTS TIME: dispatch and combine take {mine / theirs - 1:.1%} longer ({summed}), since the busiest port"
            f" carries more although all together carry less{hint}"
        )
    elif theirs:
        yield f"dispatch and combine take {1 - mine / theirs:.1%} less time ({summed}): the busiest port carries less"
