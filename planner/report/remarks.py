"""Remarks beside an answer: doubts that no screen leaves out, and what else to know; the sections that show them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...runtime.plan import Contender, Part, Plan, SizedGain, Verdict
from ..document import Section, Table, Text
from ..evaluate.costs import ENCODING, FUSED, JOIN, MOVED
from ..evaluate.evaluate import MATTERS
from ..evaluate.journey import EXACTLY, WITHOUT_WATERFILL
from ..evaluate.metrics import AROUND, BALANCE, COMBINE, DISPATCH, EXCHANGE, EXPERTS, KV, METRICS, SIZED
from ..evaluate.price import PASSES, STEP
from ..evaluate.step_size import usual_size
from ..figures import (
    TimeUnit,
    bytes_text,
    change_text,
    contender_of,
    contender_table,
    figure_of,
    headlines,
    legend,
    percent,
    shown,
)
from ..options import EvaluationOptions, SecondsOptions
from ..strategies.strategy import Strategy
from .answer import interval_text

MOST_REMARKS = 5
EXCHANGES = {KV: "gathering K and V", DISPATCH: "dispatch", COMBINE: "combine"}
BYTES = [spec.name for spec in METRICS.values() if spec.unit == "bytes" and spec.needs == SIZED]  # of copies, K and V
RULES = {
    "even": "shared alike",
    "nearest": "the token's own device, else its node, else all alike",
    "static": "a fixed one for each device: its own, else on its node, else a fair choice",
    "round_robin": "in turn, for each expert and from each device apart",
    "quota": "by the exact split of each step, near their tokens",
    "lp": "by the exact split of each step, wherever tokens are",
}
WEIGHTS = " where tokens bound it; in small steps reading weights does, and replicas have more of them"
MOST_STEPS = 10  # an interval from fewer says little of others


def judged_sections(
    part: Part,
    verdict: Verdict,
    doubted: Sequence[str],
    lines: Sequence[str],
    metrics: Sequence[str],
    *,
    table: Table | None = None,
    whole: bool = False,
) -> Iterator[Section]:
    """The table beside today, all doubts, and further remarks, of which those beyond five are among the details.

    The table is of the part's contenders unless another is given. On a narrow screen it leaves its last columns out
    unless one of the two is to be shown `whole`.
    """
    today, judged, room = verdict.against, verdict.metric, max(MOST_REMARKS - len(doubted), 1)
    shown, more = [*doubted, *lines[:room]], lines[room:]
    first = table or contender_table(part, headlines(part, judged), today=today, judged=judged)
    first = replace(first, whole=whole or first.whole)
    yield Section("Beside today", (first,))
    if shown:
        yield Section("Remarks", (Text.of(*shown),), pointer=f"{len(more)} more: --verbose" if more else "")
    if more:
        yield Section("More remarks", (Text.of(*more),), verbose=True)
    every = contender_table(part, metrics, today=today, ranged=True)
    yield Section("All figures (95 % intervals)", (every, Text(("", *legend(part, metrics)))), verbose=True)


def remarks(plan: Plan, part: Part, strategies: Sequence[Strategy]) -> Iterator[str]:
    """Remarks of the strategy, and what gives seconds, where there are none."""
    assert plan.verdict is not None
    ours, base = part.contenders[0], contender_of(part, plan.verdict.against)
    yield from _untimed(plan, ours, base)
    if strategies:
        yield from strategies[0].remarks(plan, part)


def doubts(plan: Plan, part: Part) -> Iterator[str]:
    """Remarks that no screen leaves out: the gain at other sizes of a step, and limits of the figures."""
    assert plan.verdict is not None
    ours, base = part.contenders[0], contender_of(part, plan.verdict.against)
    yield from by_size(plan.verdict, part)
    if plan.evaluation is not None and plan.evaluation.held_out is None:
        yield _fitted(EvaluationOptions.of(plan), part)
    yield from _wire(plan, part)
    if words := by_engine(plan):
        yield words
    if plan.fills:
        yield fill_words(part)
    yield from copies_remarks(plan.verdict, ours, base)
    mine, theirs = (contender.metrics.get(BALANCE) for contender in (ours, base))
    if plan.verdict.metric != BALANCE and mine and theirs and mine.value > theirs.value * (1 + MATTERS):
        yield f"costs balance: the busiest device carries {mine.value:.2f} times the mean (today {theirs.value:.2f})"
    yield from _steps(plan, part)
    yield from _trust(plan, part)


def by_engine(plan: Plan) -> str:
    """The rule of an engine by which a plan was judged; empty where it was by its own."""
    rule = plan.judged_by
    if rule is None or plan.placement is None or rule == plan.placement.replica_rule:
        return ""
    return rule_words(rule)


def rule_words(rule: str) -> str:
    """Words for a replica rule."""
    return f"replicas by the rule {rule} ({RULES[rule]})"


def fill_words(part: Part) -> str:
    """Words for shared experts as load, and what the first contender gives with them at home."""
    ours = part.contenders[0]
    home = contender_of(part, f"{ours.name}, {WITHOUT_WATERFILL}/{ours.dispatch_model}")
    spec = METRICS[next(name for name in (STEP, EXPERTS, BALANCE) if name in ours.metrics)]
    filled, without = (shown(spec, figure_of(one, spec.name)) for one in (ours, home))
    figures = f"{spec.noun} {filled}, and {without} with shared experts at home"
    return f"shared experts are load in every row, where SGLang's waterfill puts them: {figures}"


def by_size(verdict: Verdict, part: Part) -> Iterator[str]:
    """Gain at each step size that was judged, and the sizes at which it is certain."""
    if len(verdict.sizes) < 2:
        return
    listed = ", ".join(_sized(gain, part) for gain in verdict.sizes)
    yield f"this plan by tokens per step (95 %): {listed}{_turn(verdict)}"


def _sized(gain: SizedGain, part: Part) -> str:
    """The gain at a size of a step, with its interval, and whether the part holds less than such a step."""
    how = ", scaled up" if part.lacks(gain.tokens_per_step) else ""
    interval = interval_text(gain.share) or "too few steps"
    return f"{change_text(gain.share.value)} at {gain.tokens_per_step:,.0f} ({interval}{how})"


def _turn(verdict: Verdict) -> str:
    """The judged sizes at which a gain is sure and matters; empty where these are all, or none."""
    sure = [
        gain.share.low is not None and gain.share.low >= verdict.at_least and gain.share.value >= MATTERS
        for gain in verdict.sizes
    ]
    if all(sure) or not any(sure):
        return ""
    sizes = [f"{gain.tokens_per_step:,.0f}" for gain, certain in zip(verdict.sizes, sure, strict=True) if certain]
    rising = all(sure[sure.index(True) :])
    where = f"from {sizes[0]} on" if rising else f"at {' and '.join(sizes)}"
    return f"; a sure gain {where}"


def copies_remarks(verdict: Verdict, ours: Contender, base: Contender) -> Iterator[str]:
    """Warn of exchanges that take longer, or carry more bytes, although a contender judged by copies makes fewer."""
    if METRICS[verdict.metric].unit != "count":
        return
    ours_s, base_s = (
        [contender.metrics[name].value for name in EXCHANGES if name in contender.metrics] for contender in (ours, base)
    )
    both = all(name in contender.metrics for name in (DISPATCH, COMBINE) for contender in (ours, base))
    if both and sum(ours_s) > sum(base_s) * (1 + MATTERS):
        parts = ", ".join(word for name, word in EXCHANGES.items() if name in ours.metrics)
        took = " per step, against ".join(map(TimeUnit.worded, (sum(ours_s), sum(base_s))))
        yield f"fewer copies, but more time: {parts} take {took}"
    if not all(name in ours.metrics for name in BYTES):
        return
    summed = [
        sum(contender.metrics[name].value for name in BYTES if name in contender.metrics) for contender in (ours, base)
    ]
    if summed[0] > summed[1] * (1 + MATTERS):
        yield (
            "fewer copies, but more bytes in total: gathering K and V costs more than the copies save"
            f" ({bytes_text(summed[0])} per step against {bytes_text(summed[1])})"
        )


def _fitted(options: EvaluationOptions, part: Part) -> str:
    """Warning that a plan is judged on the samples it was fitted to."""
    if part.num_samples > 1:
        return "judged on the samples it was fitted to, because nothing was held out: expect less on others"
    by_counts = options.home == "none"
    what, same = ("one snapshot of counts", "counts") if by_counts else (f"one {options.unit}", "tokens")
    return (
        f"{what}: fitted and judged on the same {same}; to know how it holds record a second one: moeplan trace import"
        " FILES -o second; moeplan compare PLAN --trace second"
    )


def _wire(plan: Plan, part: Part) -> Iterator[str]:
    """Remark on hidden vectors in another form: results change, and how much of the gain is theirs."""
    if (wire := plan.decisions.wire) is None:
        return
    assert plan.verdict is not None
    base = contender_of(part, plan.verdict.against)
    metric = next((name for name in (STEP, EXCHANGE, *BYTES) if name in base.metrics and figure_of(base, name)), None)
    gains = ""
    if metric is not None:
        with_it, without = (
            contender_of(part, f"{name}/{plan.dispatch_model}") for name in (f"{base.name}, {wire}", EXACTLY)
        )
        alone, rest = (
            change_text(1 - figure_of(contender, metric) / figure_of(base, metric)) for contender in (with_it, without)
        )
        gains = f"; {METRICS[metric].noun}: {alone} by {wire} rows alone, {rest} by the rest alone"
    yield f"{wire} rows: results change, as vectors for other devices are rounded{gains}"


def _steps(plan: Plan, part: Part) -> Iterator[str]:
    """Describe the steps behind the figures, where these are few or incomplete."""
    options = EvaluationOptions.of(plan)
    if options.use is None and options.size == usual_size(None, plan.cluster.num_devices):
        yield (
            "assuming prefill (counts carry no phase). Decode: --tokens-per-step <concurrent sequences>. Training:"
            " --for training"
        )
    if scaled := scaled_up(part):
        yield scaled
    elif part.dropped_samples:
        steps = f"{part.num_steps} complete step{'s' * (part.num_steps > 1)}"
        yield f"steps: {steps} ({part.dropped_samples} trailing {options.unit}s dropped)"
    if plan.decisions.sample_policy is not None and 1 < part.num_steps < MOST_STEPS:
        how = ", or put fewer tokens in each with --tokens-per-step" if options.size else ""
        yield f"judged on {part.num_steps} steps, which are few: record more{how}"


def scaled_up(part: Part) -> str:
    """Warning that a part holds less than a step; empty where it holds one."""
    if not part.lacks(part.tokens_per_step):
        return ""
    return f"a step is scaled up from the {part.num_tokens:,} tokens there are to judge by: record more"


def _untimed(plan: Plan, ours: Contender, base: Contender) -> Iterator[str]:
    """Without seconds: the experts' time by the balance, and the command that makes a profile, if there is none."""
    if EXPERTS in ours.metrics or not all(BALANCE in contender.metrics for contender in (ours, base)):
        return
    mine, theirs = (figure_of(contender, BALANCE) for contender in (ours, base))
    less = 1 - mine / theirs
    if abs(less) >= MATTERS:
        yield (
            f"balance {mine:.2f} against {theirs:.2f}: the busiest device's experts take about"
            f" {percent(abs(less))} {'less' if less >= 0 else 'more'} time"
            f"{WEIGHTS if plan.placement is not None and plan.placement.has_replicas else ''}"
        )
    if plan.inputs.profile is not None:
        return
    cluster = f" --cluster {plan.cluster} --link inter=GBps:us" if plan.cluster.num_nodes > 1 else ""
    yield f"for seconds of a step: moeplan profile, or moeplan profile --preset h200_sxm{cluster}"


def _trust(plan: Plan, part: Part) -> Iterator[str]:
    """Warn of seconds that are missing, extrapolated, in another dtype, or not the metric of the verdict."""
    if "seconds" not in plan.options or plan.verdict is None:
        return
    options = SecondsOptions.of(plan)
    extrapolated, shares = options.extrapolated, dict[str, list[str]]()
    for name in (
        name for name in extrapolated if name not in PASSES or len(extrapolated) == 1
    ):  # passes are of the other parts
        shares.setdefault(percent(extrapolated[name]), []).append(METRICS[name].column)
    if listed := "; ".join(f"{', '.join(names)} in {share} of layers" for share, names in shares.items()):
        yield f"outside the sizes measured, so that their seconds are extrapolated: {listed}"
    if options.other_dtype:
        yield f"{' and '.join(options.other_dtype)} as measured in another dtype than the model's"
    if options.noisy and METRICS[plan.verdict.metric].unit == "seconds":
        yield f"timed by curves of a NOISY machine: {', '.join(options.noisy)}; profile again when it is quiet"
    judged = part.contenders[0], contender_of(part, plan.verdict.against)
    if plan.verdict.metric != STEP and all(STEP in contender.metrics for contender in judged):
        yield f"judged by {METRICS[plan.verdict.metric].noun}: the two steps do not time the same passes"
    models = {contender.dispatch_model for contender in judged}
    if "attention" in options.missing and len(models) > 1 and plan.verdict.metric == STEP:
        yield "attention is not timed; its time differs when tokens do not return home"
    if options.sources.get(MOVED, "").endswith(FUSED) and plan.verdict.metric in (STEP, AROUND):
        yield (
            "attention of samples that move takes longer than these seconds: the profile has fused attention, no"
            f" attended; {JOIN}"
        )
    described = "attention" in options.sources and MOVED not in options.sources
    if described and plan.dispatch_model == "migrating" and plan.verdict.metric in (STEP, AROUND):
        yield (
            "attention is described, not measured: moeplan.runtime takes longer for that of samples that move; measure"
            " both with moeplan profile"
        )
    if plan.inputs.profile is None:  # `_untimed` says how to have one
        return
    if ENCODING in options.missing:
        yield f"encoding fp8 rows takes no time here: {options.missing[ENCODING]}"
    alike = dict[str, list[str]]()
    for name, reason in options.missing.items():
        # K and V are gathered only where tokens do not return home
        if name == ENCODING or (name == "kv" and "coherent" not in models):
            continue
        alike.setdefault(reason, []).append(name)
    yield from (f"no seconds of {', '.join(names)}: {reason}" for reason, names in alike.items())
