"""Remarks below a plan's table, the most important first."""

from collections.abc import Iterator, Sequence

from ...runtime.plan import Contender, Part, Plan
from ..figures import TimeUnit, find, megabytes
from ..options import SecondsOptions, parsed
from ..strategies.strategy import Strategy

__all__ = ["more_bytes", "remarks", "slower_exchange"]

COPIES = ("device_copies", "node_copies")
EXCHANGES = {"kv_s": "gathering K and V", "dispatch_s": "dispatch", "combine_s": "combine"}
LITTLE = 0.01  # more of something is not worth mention
MOST_STEPS = 10  # an interval from fewer says little of others


def remarks(plan: Plan, part: Part, strategies: Sequence[Strategy]) -> Iterator[str]:
    """Remarks that qualify the answer, the strategy's own, and limits of the figures."""
    assert plan.verdict is not None
    ours, base = part.contenders[0], find(part, plan.verdict.against)
    if plan.evaluation is not None and plan.evaluation.held_out is None:
        yield "judged on the samples it was fitted to, because nothing was held out: expect less on others"
    if plan.verdict.metric in COPIES:
        yield from slower_exchange(ours, base)
        yield from more_bytes(ours, base)
    for one in strategies[:1]:
        yield from one.remarks(plan, part)
    yield from _balance_price(ours, base, plan)
    yield from _steps(plan, part)
    yield from _trust(plan, part)


def slower_exchange(ours: Contender, base: Contender) -> Iterator[str]:
    """Warn of exchanges that take longer although a contender makes fewer copies."""
    ours_s, base_s = (
        {name: one.metrics[name].value for name in EXCHANGES if name in one.metrics} for one in (ours, base)
    )
    both = {"dispatch_s", "combine_s"} <= ours_s.keys() & base_s.keys()
    if both and sum(ours_s.values()) > sum(base_s.values()) * (1 + LITTLE):
        parts, took = ", ".join(EXCHANGES[name] for name in ours_s), (sum(ours_s.values()), sum(base_s.values()))
        yield f"fewer copies, but more time: {parts} take {' per step, against '.join(map(TimeUnit.worded, took))}"


def more_bytes(ours: Contender, base: Contender) -> Iterator[str]:
    """Warn of a contender that gathers more bytes of K and V than its fewer copies save."""
    if not {"kv_bytes", "intra_bytes"} <= ours.metrics.keys():
        return
    summed = [
        sum(one.metrics[name].value for name in ("intra_bytes", "inter_bytes", "kv_bytes") if name in one.metrics)
        for one in (ours, base)
    ]
    if summed[0] > summed[1] * (1 + LITTLE):
        yield (
            "fewer copies, but more bytes in total: gathering K and V costs more than the copies save"
            f" ({megabytes(summed[0])} MB per step against {megabytes(summed[1])})"
        )


def _balance_price(ours: Contender, base: Contender, plan: Plan) -> Iterator[str]:
    """Warn of loads less even than the baseline's."""
    mine, theirs = (one.metrics.get("balance") for one in (ours, base))
    if plan.verdict is None or plan.verdict.metric == "balance" or not mine or not theirs:
        return
    if mine.value > theirs.value * (1 + LITTLE):
        yield f"costs balance: the busiest device carries {mine.value:.2f} times the mean (today {theirs.value:.2f})"


def _steps(plan: Plan, part: Part) -> Iterator[str]:
    """Describe the steps behind the figures, where these are few or incomplete."""
    options = plan.options.get("evaluation", {})
    unit, derived = options.get("unit", "sample"), options.get("step") == "derived"
    if derived and part.num_samples < options.get("samples_per_step", 0):
        yield f"steps: one incomplete step of {part.num_samples} {unit}s; set --samples-per-step"
    elif part.dropped_samples:
        steps = f"{part.num_steps} complete step{'s' * (part.num_steps > 1)}"
        yield f"steps: {steps} ({part.dropped_samples} trailing {unit}s dropped)"
    if plan.decisions.sample_policy is not None and 1 < part.num_steps < MOST_STEPS:
        how = ", or put fewer samples in each with --samples-per-step" if derived else ""
        yield f"judged on {part.num_steps} steps, which are few: record more{how}"


def _trust(plan: Plan, part: Part) -> Iterator[str]:
    """Warn of seconds that are missing, extrapolated, in another dtype, or not what the verdict is on."""
    if "seconds" not in plan.options or plan.verdict is None:
        return
    options = parsed(SecondsOptions, dict(plan.options["seconds"]), "seconds")
    if stretched := ", ".join(f"{name} {share:.0%}" for name, share in options.extrapolated.items()):
        yield f"beyond the sizes measured, share of layers: {stretched}; profile larger sizes"
    if options.other_dtype:
        yield f"{' and '.join(options.other_dtype)} as measured in another dtype than the model's"
    contenders = {one.label: one for one in part.contenders}
    base = contenders.get(plan.verdict.against)
    both = base is not None and all("step_s" in one.metrics for one in (part.contenders[0], base))
    if plan.verdict.metric != "step_s" and both:
        yield (
            f"judged by {plan.verdict.metric}, not by the step: attention is not timed, and takes another time where"
            " tokens do not return home"
        )
    if missing := ", ".join(options.missing):
        yield f"no seconds of {missing}: --verbose says why"
