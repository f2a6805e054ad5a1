"""Answer of a plan or a comparison: the gain over today in percent and in its unit."""

from typing import TYPE_CHECKING

from ...errors import InputError
from ...runtime.exports import Engine, strays
from ...runtime.plan import Contender, Metric, Part, Plan, Verdict
from ..evaluate.evaluate import MATTERS
from ..evaluate.journey import EVENLY, is_today
from ..evaluate.metrics import ATTENTION, BALANCE, EXPERTS, METRICS
from ..evaluate.price import PASSES, STEP
from ..figures import (
    bytes_text,
    change_text,
    contender_of,
    figure_of,
    percent,
    shown,
    worded,
)
from ..options import EvaluationOptions, SecondsOptions
from ..strategies.auto.options import AutoOptions
from ..strategies.registry import decided_by

if TYPE_CHECKING:
    from ..compare import Comparison

NOTHING_TO_GAIN, WORSE = "no benefit expected", "worse than today, keep what runs"
MOSTLY = 0.5  # of the layers of steps


def gain_words(verdict: Verdict, part: Part, *, of: str | None = None) -> str:
    """A verdict's gain in words: the change from the baseline in percent, with its interval.

    It is that of the contender with the label `of`, else of the first.
    """
    if verdict.metric not in METRICS:
        raise InputError(f"a verdict on {verdict.metric!r:.40}, which is no metric; re-run moeplan solve")
    spec, share = METRICS[verdict.metric], verdict.share or Metric(value=0.0)
    ours = part.contenders[0] if of is None else contender_of(part, of)
    theirs = contender_of(part, verdict.against)
    base = figure_of(theirs, verdict.metric)
    against = "today" if is_today(verdict.against) else f"of {worded(verdict.against)}"
    figures = f"{shown(spec, figure_of(ours, verdict.metric))} against {shown(spec, base)} {against}"
    interval = f"95 %: {interval_text(share)}" if interval_text(share) else "no interval"
    return f"{change_text(share.value)} {_noun(verdict, theirs)} ({figures}; {interval})"


def headline(plan: Plan) -> str:
    """The gain alone, or why there is none, in a few words; empty for a plan that was not judged."""
    verdict, evaluation, doubted = plan.verdict, plan.evaluation, doubt(plan)
    if verdict is None or evaluation is None:
        return ""
    if verdict.share is None or doubted in (NOTHING_TO_GAIN, WORSE):
        return doubted
    noun = _noun(verdict, contender_of(evaluation.judging, verdict.against))
    doubts = ", not certain" if doubted else ""
    changes = ", results change" if plan.decisions.wire is not None else ""
    return f"{change_text(verdict.share.value)} {noun}{doubts}{changes}"


def _noun(verdict: Verdict, against: Contender) -> str:
    """What a verdict's gain is less of."""
    nouns = {STEP: f"of the {'' if ATTENTION in against.metrics else 'MoE '}step", EXPERTS: "of the experts' time"}
    return nouns.get(verdict.metric, METRICS[verdict.metric].noun)


def interval_text(share: Metric) -> str:
    """The change at both ends of a gain's interval; empty where it has none."""
    return "" if share.low is None or share.high is None else change_text(share.high, share.low)


def doubt(plan: Plan) -> str:
    """Words of a verdict that shows no benefit; empty where it shows one."""
    if plan.verdict is None:
        return "not judged"
    if plan.verdict.value == "benefit":
        return ""
    if plan.verdict.gain.low is None:
        return "no benefit shown"
    if plan.verdict.gain.high is not None and plan.verdict.gain.high < 0:
        return WORSE
    share = plan.verdict.share
    return "gain not certain" if share is not None and share.value >= MATTERS else NOTHING_TO_GAIN


def judged_for(plan: Plan) -> str | None:
    """The use that a plan was judged for; None where it is not known."""
    return EvaluationOptions.of(plan).use if EvaluationOptions.key in plan.options else None


def carried(plan: Plan, engine: Engine) -> str:
    """The gain of what an engine carries out of a plan, beside that of the whole; empty where it carries out all."""
    share = None if plan.verdict is None else plan.verdict.share
    left = [name.replace("_", " ") for name in plan.decisions.names if name not in engine.carries]
    why = f"it does not carry out the plan's {' and '.join(left)}" if left else ""
    if "placement" in engine.carries and (other := strays(engine, plan)):
        why = f"{why}{', and ' if why else ''}{other}"
    if not why or share is None:
        return ""
    tried = AutoOptions.of(plan).tried if AutoOptions.key in plan.options else ()
    kept = tuple(name for name in plan.decisions.names if name in engine.carries)
    for candidate in tried:
        if candidate.decisions == kept and {*candidate.parts} <= {*tried[0].parts} and engine.name in candidate.engines:
            return f"with {engine.name}: {change_text(candidate.share.value)}, not {change_text(share.value)}: {why}"
    solve = f"moeplan solve --engine {engine.name} plans for it"
    return f"{engine.name} will not reach {change_text(share.value)}: {why}; {solve}"


def split_words(plan: Plan) -> str:
    """Balance of a plan for steps that are split exactly, and where replicas share alike; empty for other plans."""
    if plan.evaluation is None:
        return ""
    part, unseen = plan.evaluation.judging, "unseen" if plan.evaluation.held_out else "fitted"
    figures = {
        contender.name: contender.metrics[BALANCE].value
        for contender in part.contenders
        if BALANCE in contender.metrics
    }
    if EVENLY not in figures:
        return ""
    exact, even = figures[part.contenders[0].name], figures[EVENLY]
    return f"{exact:.2f} where steps are split exactly, {even:.2f} where not, on {part.num_steps:,} {unseen} steps"


def answer(plan: Plan) -> str:
    """The answer: whether a plan pays, by how much, for which step, on which samples."""
    verdict, evaluation = plan.verdict, plan.evaluation
    if verdict is None or evaluation is None:
        if words := next(filter(None, (strategy.answer(plan) for strategy in decided_by(plan))), ""):
            return words
        return f"{doubt(plan) or 'benefit'}: the plan holds no figures that show it"
    part, options = evaluation.judging, EvaluationOptions.of(plan)
    unit, gain = options.unit, gain_words(verdict, part)
    number = part.num_steps if unit == "step" else part.num_samples - part.dropped_samples
    samples = f"on {number:,} {'unseen' if evaluation.held_out else 'fitted'} {unit}{'s' * (number != 1)}"
    if unit != "step":
        samples += f" ({part.num_steps:,} step{'s' * (part.num_steps != 1)})"
    where = f"{step_words(options, part)}, {samples}{_memory(plan)}{_reach(plan, part)}"
    if part.contenders[0].metrics == contender_of(part, verdict.against).metrics:
        return f"the plan is what runs today: {gain}, {where}"
    if not (doubted := doubt(plan)):
        return f"{gain}, {where}"
    if verdict.gain.low is None:
        return f"{doubted}: {gain}, {where}; one step shows nothing of others: record more"
    return f"{doubted}: {gain}{short_of(verdict)}, {where}"


def step_words(judged: "EvaluationOptions | Comparison", part: Part) -> str:
    """A step in words: its use, and its tokens."""
    size, use = judged.size, judged.use
    tokens = f"{part.tokens_per_step:,.0f} tokens"
    if size is None:
        return f"recorded steps of {tokens}"
    if size.unit == "sequences":
        return f"decode, {size.number:,} concurrent sequences: {tokens} per step"
    what = f"{tokens} per step" if size.unit == "tokens" else f"{size.number:,} samples per step ({tokens})"
    prompts = " (decoded tokens, taken as if of prompts)" if judged.as_prompts else ""
    return f"{use}{prompts}, {what}" if use else what


def _memory(plan: Plan) -> str:
    """Number of replicas and their memory per device. Empty without any."""
    placement = plan.placement
    if placement is None or not placement.has_replicas:
        return ""
    extra = placement.num_slots - placement.num_experts
    replicas = f"; {extra} replica{'s' * (extra > 1)} per layer: "
    if (each := plan.model.expert_bytes) is None:
        held = placement.num_experts + plan.fills * placement.num_devices  # shared experts that count included
        return f"{replicas}+{percent(extra / held)} expert memory"
    most = placement.slots.max() - placement.num_experts / (placement.slots > 0).sum()
    return f"{replicas}+{bytes_text(most * placement.num_layers * each)} per device"


def _reach(plan: Plan, part: Part) -> str:
    """How far a gain reaches beyond what was measured and recorded, and where it is a loss; empty where neither is."""
    assert plan.verdict is not None
    beyond = list[str]()
    if METRICS[plan.verdict.metric].unit == "seconds" and SecondsOptions.key in plan.options:
        shares = SecondsOptions.of(plan).extrapolated
        parts = [METRICS[name].column for name, share in shares.items() if share > MOSTLY and name not in PASSES]
        beyond += [f"seconds of {' and '.join(parts)} extrapolated"] if parts else []
    beyond += ["the step scaled up"] if part.lacks(part.tokens_per_step) else []
    losses = [gain for gain in plan.verdict.sizes if gain.share.high is not None and gain.share.high < 0]
    if losses and plan.verdict.value == "benefit":
        beyond.append(f"a loss at {' and '.join(f'{gain.tokens_per_step:,.0f}' for gain in losses)}")
    return "".join(f"; {words}" for words in beyond)


def short_of(verdict: Verdict) -> str:
    """Threshold that a positive gain must reach to pay, in words. Empty where there is none."""
    if not verdict.at_least or verdict.gain.value <= 0:
        return ""
    return f"; moving samples pays where the gain is certainly above {percent(verdict.at_least)}"
