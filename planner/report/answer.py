"""The answer of a plan or a comparison: what is gained over today, in percent and in its unit, and remarks on it."""

from collections.abc import Iterator, Sequence

from ...errors import InputError
from ...runtime.plan import Contender, Part, Plan, Verdict
from ..document import Section, Text
from ..evaluate.journey import TODAY
from ..evaluate.metrics import BALANCE, COMBINE, DISPATCH, KV, METRICS
from ..evaluate.price import STEP
from ..figures import TimeUnit, contender_table, find, headlines, legend, megabytes, shown, value, worded
from ..options import EvaluationOptions, SecondsOptions
from ..strategies.strategy import Strategy

MOST_REMARKS = 5
EXCHANGES = {KV: "gathering K and V", DISPATCH: "dispatch", COMBINE: "combine"}
BYTES = [spec.name for spec in METRICS.values() if spec.unit == "bytes"]
LITTLE = 0.01  # more of something is not worth mention
MOST_STEPS = 10  # an interval from fewer says little of others


def gain_words(verdict: Verdict, part: Part, *, of: str | None = None) -> str:
    """A verdict's gain in words: percent less, or more, than what the plan is held against, with its interval.

    It is that of the contender with the label `of`, else of the first.
    """
    if verdict.metric not in METRICS:
        raise InputError(f"a verdict on {verdict.metric!r:.40}, which is no metric; re-run moeplan solve")
    spec, gain = METRICS[verdict.metric], verdict.gain
    ours = part.contenders[0] if of is None else find(part, of)
    base = value(find(part, verdict.against), verdict.metric)
    name, _, dispatch_model = verdict.against.rpartition("/")
    alive = dispatch_model == "standard" and name.startswith("contiguous without ")  # dead devices
    against = "today" if alive or verdict.against == TODAY else worded(verdict.against)
    figures = f"{shown(spec, value(ours, verdict.metric))} against {shown(spec, base)}"
    less = "more" if gain.value < 0 else "less" if spec.unit in ("seconds", "ratio") else "fewer"
    if not base or not gain.value:
        return f"no {'less' if less != 'fewer' else 'fewer'} {spec.noun} than {against} ({figures})"
    sign = 1 if gain.value > 0 else -1
    ends = "no interval"
    if gain.low is not None and gain.high is not None:
        low, high = sorted((sign * gain.low, sign * gain.high))
        ends = f"95 %: {100 * low / base:.1f} to {100 * high / base:.1f} %"
    return f"{100 * abs(gain.value) / base:.1f} % {less} {spec.noun} than {against} ({figures}; {ends})"


def answer(plan: Plan) -> str:
    """Whether a plan pays, and by how much, on which samples."""
    verdict, evaluation = plan.verdict, plan.evaluation
    if verdict is None or evaluation is None:
        return "not judged"
    part, unit = evaluation.judging, EvaluationOptions.of(plan).unit
    gain, number = gain_words(verdict, part), part.num_steps if unit == "step" else part.num_samples
    samples = f"on {number:,} {'unseen' if evaluation.held_out else 'fitted'} {unit}{'s' * (number != 1)}"
    if part.contenders[0].metrics == find(part, verdict.against).metrics:
        return f"what runs today, the baseline of every verdict: {gain}, {samples}"
    if verdict.value == "benefit":
        return f"benefit: {gain}, {samples}"
    if verdict.gain.low is None:
        return f"no benefit shown: {gain}; one step shows nothing: --samples-per-step, or record more"
    return f"no benefit expected: {gain}{short_of(verdict)}, {samples}"


def short_of(verdict: Verdict) -> str:
    """Threshold that a positive gain must reach to pay, in words. Empty where there is none."""
    if not verdict.at_least or verdict.gain.value <= 0:
        return ""
    return f"; moving samples pays where the gain is surely above {verdict.at_least:.0%}"


def remarks(plan: Plan, part: Part, strategies: Sequence[Strategy]) -> Iterator[str]:
    """Remarks that qualify the answer, the strategy's own, and limits of the figures."""
    assert plan.verdict is not None
    ours, base = part.contenders[0], find(part, plan.verdict.against)
    if plan.evaluation is not None and plan.evaluation.held_out is None and part.num_samples == 1:
        by_counts = EvaluationOptions.of(plan).home == "none"
        what, same = (
            ("one snapshot of counts", "counts") if by_counts else (f"one {EvaluationOptions.of(plan).unit}", "tokens")
        )
        yield f"{what}: fitted and judged on the same {same}; record a second one to know how it holds"
    elif plan.evaluation is not None and plan.evaluation.held_out is None:
        yield "judged on the samples it was fitted to, because nothing was held out: expect less on others"
    yield from copies_remarks(plan.verdict, ours, base)
    for one in strategies[:1]:
        yield from one.remarks(plan, part)
    mine, theirs = (one.metrics.get(BALANCE) for one in (ours, base))
    if plan.verdict.metric != BALANCE and mine and theirs and mine.value > theirs.value * (1 + LITTLE):
        yield f"costs balance: the busiest device carries {mine.value:.2f} times the mean (today {theirs.value:.2f})"
    yield from _steps(plan, part)
    yield from _trust(plan, part)


def copies_remarks(verdict: Verdict, ours: Contender, base: Contender) -> Iterator[str]:
    """Warn of exchanges that take longer, or carry more bytes, although a contender judged by copies makes fewer."""
    if METRICS[verdict.metric].unit != "count":
        return
    ours_s, base_s = ([one.metrics[name].value for name in EXCHANGES if name in one.metrics] for one in (ours, base))
    both = all(name in one.metrics for name in (DISPATCH, COMBINE) for one in (ours, base))
    if both and sum(ours_s) > sum(base_s) * (1 + LITTLE):
        parts = ", ".join(word for name, word in EXCHANGES.items() if name in ours.metrics)
        took = " per step, against ".join(map(TimeUnit.worded, (sum(ours_s), sum(base_s))))
        yield f"fewer copies, but more time: {parts} take {took}"
    if not all(name in ours.metrics for name in BYTES):
        return
    summed = [sum(one.metrics[name].value for name in BYTES if name in one.metrics) for one in (ours, base)]
    if summed[0] > summed[1] * (1 + LITTLE):
        yield (
            "fewer copies, but more bytes in total: gathering K and V costs more than the copies save"
            f" ({megabytes(summed[0])} MB per step against {megabytes(summed[1])})"
        )


def judged_sections(part: Part, verdict: Verdict, lines: Sequence[str], metrics: Sequence[str]) -> Iterator[Section]:
    """The table beside today, at most five remarks, the others among the details, and all figures of these metrics."""
    today, judged, more = verdict.against, verdict.metric, lines[MOST_REMARKS:]
    first = contender_table(part, headlines(part, judged), today=today, judged=judged)
    yield Section("Beside today", (first,))
    if lines:
        pointer = [f"{len(more)} more: --verbose"] if more else []
        yield Section("Remarks", (Text.of(*lines[:MOST_REMARKS], *pointer),))
    if more:
        yield Section("More remarks", (Text.of(*more),), verbose=True)
    every = contender_table(part, metrics, today=today, ranged=True)
    yield Section("All figures (95 % intervals)", (every, Text(("", *legend(part, metrics)))), verbose=True)


def _steps(plan: Plan, part: Part) -> Iterator[str]:
    """Describe the steps behind the figures, where these are few or incomplete."""
    options = EvaluationOptions.of(plan)
    unit, derived = options.unit, options.step == "derived"
    if derived and part.num_samples < options.samples_per_step:
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
    options = SecondsOptions.of(plan)
    if stretched := ", ".join(f"{name} {share:.0%}" for name, share in options.extrapolated.items()):
        yield f"beyond the sizes measured, share of layers: {stretched}; profile larger sizes"
    if options.other_dtype:
        yield f"{' and '.join(options.other_dtype)} as measured in another dtype than the model's"
    judged = part.contenders[0], find(part, plan.verdict.against)
    if plan.verdict.metric != STEP and all(STEP in one.metrics for one in judged):
        yield (
            f"judged by {plan.verdict.metric}, not by the step: attention is not timed, and takes another time where"
            " tokens do not return home"
        )
    if missing := ", ".join(options.missing):
        yield f"no seconds of {missing}: --verbose says why"
