"""Screen and page of a netmoe plan: samples moved, what that saves, and simpler ways that save as much."""

from collections.abc import Iterator

from ....runtime.plan import Contender, Part, Plan
from ....solvers.cost import inter_ratio
from ...document import Section, Text
from ...evaluate.metrics import COPIES, EXCHANGE, FAR_BYTES, MOVED, NODE_COPIES
from ...evaluate.price import STEP
from ...figures import TimeUnit, contender_of, figure_of, percent
from .options import PLAN, SamplePolicyOptions

SAVED = {
    FAR_BYTES: "bytes between nodes",
    NODE_COPIES: "copies between nodes",
    COPIES: "copies between devices",
    EXCHANGE: "seconds of dispatch and combine",
}
BLIND = "unpredicted/migrating"


def remarks(plan: Plan, part: Part) -> Iterator[str]:
    """Remarks on dealing by length, on the shares saved with and without a prediction, on moves."""
    options = SamplePolicyOptions.of(plan)
    yield from _dealt(plan, part, options)
    yield from _saved(plan, part, pairs=options.copies == "pairs")
    yield (
        f"a combine delivers {percent(figure_of(contender_of(part, PLAN), MOVED))} of the samples to another"
        " device; not included: the time to solve, and the labels and positions that move along"
    )
    if options.copies == "pairs":
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
        f"locality  no homes save more than {percent(options.locality_index, 1)} of the copies between {between}:"
        " what the samples' preferences allow under this placement"
    ]
    if plan.cluster.num_nodes > 1 and plan.outcome["sample_policy"].objective.name != "exchange_s":
        known = {"intra", "inter"} <= set(plan.cluster.links)
        by = "by their links' seconds per byte" if known else "no links of both kinds are given"
        lines.append(f"cost      a copy between nodes counts as {inter_ratio(plan.cluster):.3g} inside one ({by})")
    if options.tried_s:
        tried = ", ".join(f"{method} {seconds * 1e3:.4g}" for method, seconds in options.tried_s.items())
        lines.append(f"tried     {tried} ms of timed parts per fitted step: {decision.method} is the plan's")
    lines += _exchanges(plan, plan.evaluation.judging, options)
    yield Section("Sample policy", (Text(tuple(lines)),), verbose=True)


def _dealt(plan: Plan, part: Part, options: SamplePolicyOptions) -> Iterator[str]:
    """Compare a verdict on seconds with a data loader that deals samples by length."""
    verdict, over = plan.verdict, options.over_dealt
    if verdict is None or verdict.metric not in (EXCHANGE, STEP) or over is None:
        return
    home, dealt = _home(plan, part), contender_of(part, "dealt/standard")
    yield (
        "dealing samples by length alone, once per step in a data loader, takes"
        f" {_words(_less(dealt, home, verdict.metric), 'less')} than {_named(plan, home)}"
    )
    dealt_s = figure_of(dealt, verdict.metric)
    if over.low is not None and over.low <= verdict.at_least * dealt_s:
        more = f"{percent(abs(over.value) / dealt_s if dealt_s else 0.0, 1)} {'less' if over.value >= 0 else 'more'}"
        yield f"dealing by length does as well: the plan takes {more} than that, no sure gain that pays for its moves"


def _home(plan: Plan, part: Part) -> Contender:
    """Contender with the plan's experts and chunks whose samples stay: today, or the base of the plan."""
    return part.contenders[1] if plan.decisions.names == ("sample_policy",) else contender_of(part, "base/standard")


def _named(plan: Plan, home: Contender) -> str:
    return "today" if plan.decisions.names == ("sample_policy",) else f"{home.name}, {home.dispatch_model}"


def _words(less: float, word: str) -> str:
    """A share with the word for less of it, or "more" where it is negative."""
    return f"{percent(abs(less), 1)} {word if less >= 0 else 'more'}"


def _less(ours: Contender, base: Contender, metric: str) -> float:
    """The share by which a contender has less of a metric than a base; 0 where the base has none."""
    return 1 - figure_of(ours, metric) / figure_of(base, metric) if figure_of(base, metric) else 0.0


def _saved(plan: Plan, part: Part, *, pairs: bool) -> Iterator[str]:
    """Relative gains of the plan beside the oracle's; under a base, of the placement and of re-homing alone."""
    metric, base, several = COPIES, _home(plan, part), plan.cluster.num_nodes > 1
    if several:
        metric = FAR_BYTES if FAR_BYTES in part.contenders[0].metrics else NODE_COPIES
    saved = {contender.label: _less(contender, base, metric) for contender in part.contenders}
    blind = f"{percent(saved[BLIND], 1)} without predicting the next layer, " if BLIND in saved else ""
    assert plan.decisions.sample_policy is not None
    most = "" if plan.decisions.sample_policy.method == "bottleneck" else "at most "  # it saves seconds, not bytes
    yield (
        f"{_words(saved[PLAN], 'fewer')} {SAVED[metric]} than {_named(plan, base)}:"
        f" {blind}{most}{percent(saved['oracle/migrating'], 1)} if it were known"
    )
    if metric != NODE_COPIES and several and not pairs:
        once = _less(contender_of(part, PLAN), base, NODE_COPIES)
        yield f"with one copy per token and node (DeepEP) {percent(once, 1)} are saved"
    if plan.placement is None:
        return
    for name in [metric, *([EXCHANGE] if EXCHANGE in base.metrics else [])]:
        alone, moved, both = (
            _less(contender_of(part, label), part.contenders[1], name)
            for label in ("base/standard", "contiguous/migrating", PLAN)
        )
        yield (
            f"of the {SAVED[name]} of contiguous, standard the placement alone saves {percent(alone, 1)},"
            f" re-homing alone {percent(moved, 1)}, both {percent(both, 1)}"
        )


def _exchanges(plan: Plan, part: Part, options: SamplePolicyOptions) -> Iterator[str]:
    """Seconds of both exchanges. Fewer copies take longer where the busiest port carries more."""
    ours, base = contender_of(part, PLAN), _home(plan, part)
    if not all(EXCHANGE in one.metrics for one in (ours, base)):
        return
    ours_s, base_s = (figure_of(one, EXCHANGE) for one in (ours, base))
    unit = TimeUnit.up_to(max(ours_s, base_s))
    summed = f"{unit.text(ours_s)} {unit.name} per step, {unit.text(base_s)} of {base.name}, {base.dispatch_model}"
    if ours_s > base_s:
        hint = "" if options.tried_s else " (without --method, the fastest of several is taken)"
        yield (
            f"costs time: dispatch and combine take {percent(ours_s / base_s - 1, 1)} longer ({summed}), since the"
            f" busiest port carries more although all together carry less{hint}"
        )
    elif base_s:
        less = f"{percent(1 - ours_s / base_s, 1)} less time ({summed})"
        yield f"dispatch and combine take {less}: the busiest port carries less"
