"""Screen and page of a luffy plan: what attention in the objective adds, and simpler ways that save as much."""

from collections.abc import Iterator, Mapping

from ....runtime.plan import Metric, Part, Plan
from ...document import Section, Text
from ...evaluate.metrics import AROUND, ATTENTION, EXCHANGE, MOVED
from ...figures import contender_of, figure_of, percent
from ..netmoe.options import PLAN, SamplePolicyOptions

DEALT = {
    "dealt/standard": "dealing samples by length, once per step in a data loader,",
    "dealt by cost/standard": "dealing samples by their attention, once per step in a data loader,",
}
NETMOE = {
    f"netmoe {method}/migrating": f"netmoe by {method}, which weighs exchanges alone,"
    for method in ("sum", "even", "bottleneck")
}
TODAY = 1  # the place of what runs today among a part's contenders


def remarks(plan: Plan, part: Part) -> Iterator[str]:
    """Remarks on dealing, on NetMoE, on the paper's algorithm, on the parts that are saved, and on losses."""
    options, decision, verdict = SamplePolicyOptions.of(plan), plan.decisions.sample_policy, plan.verdict
    assert decision is not None
    assert decision.attention is not None
    assert verdict is not None
    today = part.contenders[TODAY]
    if decision.attention.numbers == "free":
        yield "devices take unequal numbers of samples: weigh each rank's mean loss by model.loss_scale"
    if verdict.metric in today.metrics:
        beside = ((DEALT, options.over_dealt), (NETMOE, options.over_netmoe))
        yield "; ".join(_beside(part, ways, over, verdict.metric, verdict.at_least) for ways, over in beside)
        if any(one.label == "paper/migrating" for one in part.contenders):
            yield f"LUFFY's own Algorithm 1 takes {_less(part, 'paper/migrating', verdict.metric)} than today"
    words = {ATTENTION: "attention", EXCHANGE: "dispatch and combine", AROUND: "all of them"}
    parts = [f"{of} {_less(part, PLAN, name)}" for name, of in words.items() if name in today.metrics]
    if parts:
        yield f"under the plan take: {', '.join(parts)}"
    yield (
        f"a combine delivers {percent(figure_of(contender_of(part, PLAN), MOVED))} of the samples to another device;"
        " not included: the time to solve, and the labels and positions that move along"
    )


def sections(plan: Plan, width: int) -> Iterator[Section]:
    """The attention law, the locality index and the bound."""
    decision = plan.decisions.sample_policy
    if plan.evaluation is None or decision is None or decision.attention is None:
        return
    options, law, outcome = SamplePolicyOptions.of(plan), decision.attention, plan.outcome["sample_policy"]
    room = "" if law.room is None else f", at most {law.room:g} times the mean tokens"
    lines = [
        f"attention {law.token_s * 1e9:.3g} ns a token, {law.square_s * 1e12:.3g} ps a token squared,"
        f" {law.call_s * 1e6:.3g} us a call, {law.start_s * 1e6:.3g} us to start; samples {law.batches}, in"
        f" {law.numbers} numbers{room}",
        f"locality  no homes save more than {percent(options.locality_index, 1)} of the copies:"
        " what the samples' preferences allow under this placement",
    ]
    if outcome.gap is not None:
        lines.append(f"bound     no homes take more than {percent(outcome.gap, 1)} less than these, as predicted")
    yield Section("Sample policy", (Text(tuple(lines)),), verbose=True)


def _beside(part: Part, ways: Mapping[str, str], over: Metric | None, metric: str, at_least: float) -> str:
    """Saving of the best of some simpler ways, and whether it does as well."""
    label = min(ways, key=lambda one: figure_of(contender_of(part, one), metric))
    words, theirs = (
        f"{ways[label]} takes {_less(part, label, metric)} than today",
        figure_of(contender_of(part, label), metric),
    )
    if over is None or not theirs:
        return words
    of_theirs = percent(abs(over.value) / theirs, 1)
    if over.low is not None and over.low > at_least * theirs:
        return f"{words}; the plan takes {of_theirs} less than that"
    than = "less" if over.value >= 0 else "more"
    return f"{words}, and does as well: the plan takes {of_theirs} {than} than that, no sure gain that pays"


def _less(part: Part, label: str, metric: str) -> str:
    """The share by which a contender has less of a metric than today, or more."""
    today = figure_of(part.contenders[TODAY], metric)
    less = 1 - figure_of(contender_of(part, label), metric) / today if today else 0.0
    return f"{percent(abs(less), 1)} {'less' if less >= 0 else 'more'}"
