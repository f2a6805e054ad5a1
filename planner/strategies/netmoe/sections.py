"""Screen and page of a netmoe plan: samples moved, what that saves, and simpler ways that save as much."""

from collections.abc import Iterator

from ....runtime.plan import Contender, Part, Plan
from ....solvers.cost import inter_ratio
from ...document import Section, Text
from ...evaluate.metrics import COPIES, EXCHANGE, FAR_BYTES, MOVED, NODE_COPIES
from ...evaluate.price import STEP
from ...figures import TimeUnit, find, value
from ...options import SamplePolicyOptions

__all__ = ["remarks", "sections"]

SAVED = {
    FAR_BYTES: "bytes between nodes",
    NODE_COPIES: "copies between nodes",
    COPIES: "copies between devices",
    EXCHANGE: "seconds of dispatch and combine",
}
BLIND = "unpredicted/migrating"
TIMED = (EXCHANGE, STEP)


def remarks(plan: Plan, part: Part) -> Iterator[str]:
    """Whether dealing by length does as well, shares saved with and without a prediction, moves."""
    yield from _dealt(plan, part)
    yield from _saved(plan, part, pairs=SamplePolicyOptions.of(plan).copies == "pairs")
    yield (
        f"a combine delivers {value(find(part, 'plan/migrating'), MOVED):.0%} of the samples to another"
        " device; not included: the time to solve, and the labels and positions that move along"
    )
    if SamplePolicyOptions.of(plan).copies == "pairs":
        yield (
            "the trace holds counts only: a copy is a token-expert pair, where engines send a device one copy per"
            " token; contexts are taken as whole sequences"
        )


def sections(plan: Plan, width: int) -> Iterator[Section]:
    """The locality index, what copies cost, and the methods tried."""
    if plan.evaluation is None:
        return
    decision, options = plan.decisions.sample_policy, SamplePolicyOptions.of(plan)
    assert decision is not None
    between = "nodes" if plan.cluster.num_nodes > 1 else "devices"
    lines = [
        f"locality  no homes save more than {options.locality_index:.1%} of the copies between {between}: what the"
        " samples' preferences allow under this placement"
    ]
    if plan.cluster.num_nodes > 1 and plan.outcome["sample_policy"].objective.name != "exchange_s":
        known = {"intra", "inter"} <= set(plan.cluster.links)
        by = "by their links' seconds per byte" if known else "no links of both kinds are given"
        lines.append(f"cost      a copy between nodes counts as {inter_ratio(plan.cluster):.3g} inside one ({by})")
    if options.tried_s:
        tried = ", ".join(f"{method} {seconds * 1e3:.4g}" for method, seconds in options.tried_s.items())
        lines.append(f"tried     {tried} ms of timed parts per fitted step: {decision.method} is the plan's")
    yield Section("Sample policy", (Text((*lines, *_exchanges(plan, plan.evaluation.judging))),), verbose=True)


def _dealt(plan: Plan, part: Part) -> Iterator[str]:
    """Compare a verdict on seconds with a data loader that deals samples by length."""
    verdict, over = plan.verdict, SamplePolicyOptions.of(plan).over_dealt
    if verdict is None or verdict.metric not in TIMED or over is None:
        return
    home = _home(plan, part)
    dealt, base = (value(one, verdict.metric) for one in (find(part, "dealt/standard"), home))
    share = 1 - dealt / base if base else 0.0
    yield (
        f"dealing samples by length alone, once per step in a data loader, takes {share:z.1%} less than {home.name},"
        f" {home.dispatch_model}"
    )
    if over.low is not None and over.low <= verdict.at_least * dealt:
        more = f"{abs(over.value) / dealt if dealt else 0.0:.1%} {'less' if over.value >= 0 else 'more'}"
        yield f"dealing by length does as well: the plan takes {more} than that, no sure gain that pays for its moves"


def _home(plan: Plan, part: Part) -> Contender:
    """The same experts and chunks with samples that stay."""
    return find(part, _today(part) if plan.decisions.names == ("sample_policy",) else "base/standard")


def _today(part: Part) -> str:
    """Label of what runs today, the second contender; where devices are dead it says so."""
    return part.contenders[1].label


def _saved(plan: Plan, part: Part, *, pairs: bool) -> Iterator[str]:
    """Relative gains on every contender's own, the plan's beside the oracle's; under a base, either alone."""
    metric = COPIES
    if plan.cluster.num_nodes > 1:
        metric = FAR_BYTES if FAR_BYTES in part.contenders[0].metrics else NODE_COPIES
    base = _home(plan, part)
    saved = {
        contender.label: 1 - value(contender, metric) / value(base, metric) if value(base, metric) else 0.0
        for contender in part.contenders
    }
    blind = f"{saved[BLIND]:.1%} without predicting the next layer, " if BLIND in saved else ""
    yield (
        f"{saved['plan/migrating']:z.1%} fewer {SAVED[metric]} than {base.name}, {base.dispatch_model}:"
        f" {blind}at most {saved['oracle/migrating']:.1%} if it were known"
    )
    if metric != NODE_COPIES and plan.cluster.num_nodes > 1 and not pairs:
        once = 1 - value(find(part, "plan/migrating"), NODE_COPIES) / max(value(base, NODE_COPIES), 1e-9)
        yield f"with one copy per token and node (DeepEP) {once:.1%} are saved"
    if plan.placement is not None:
        yield from _jointly(part, [metric, *([EXCHANGE] if EXCHANGE in base.metrics else [])])


def _jointly(part: Part, metrics: list[str]) -> Iterator[str]:
    """Savings of the placement alone, of re-homing alone and of both, over contiguous experts and homes."""
    for metric in metrics:
        start = value(find(part, _today(part)), metric)
        alone, moved, both = (
            1 - value(find(part, label), metric) / start if start else 0.0
            for label in ("base/standard", "contiguous/migrating", "plan/migrating")
        )
        yield (
            f"of the {SAVED[metric]} of contiguous, standard the placement alone saves {alone:z.1%},"
            f" re-homing alone {moved:z.1%}, both {both:z.1%}"
        )


def _exchanges(plan: Plan, part: Part) -> Iterator[str]:
    """Seconds of both exchanges. Fewer copies take longer where the busiest port carries more."""
    ours = find(part, "plan/migrating")
    base = _home(plan, part)
    if not all(EXCHANGE in one.metrics for one in (ours, base)):
        return
    mine, theirs = (value(one, EXCHANGE) for one in (ours, base))
    unit = TimeUnit.up_to(max(mine, theirs))
    summed = f"{unit.text(mine)} {unit.name} per step, {unit.text(theirs)} of {base.name}, {base.dispatch_model}"
    if mine > theirs:
        hint = "" if SamplePolicyOptions.of(plan).tried_s else " (without --method, the fastest of several is taken)"
        yield (
            f"costs time: dispatch and combine take {mine / theirs - 1:.1%} longer ({summed}), since the busiest port"
            f" carries more although all together carry less{hint}"
        )
    elif theirs:
        yield f"dispatch and combine take {1 - mine / theirs:.1%} less time ({summed}): the busiest port carries less"
