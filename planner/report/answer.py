"""The answer of a plan or a comparison: what is gained over today, in percent and in its unit."""

from ...runtime.plan import Part, Plan, Verdict
from ..evaluate.journey import TODAY
from ..evaluate.metrics import METRICS
from ..figures import find, shown, value

__all__ = ["answer", "gain_words", "short_of", "standing"]


def gain_words(verdict: Verdict, part: Part, *, of: str | None = None) -> str:
    """How much less, or more, of its metric there is than in what it is held against, with its interval.

    Parameters
    ----------
    of
        The label of the contender; None: the first.
    """
    spec, gain = METRICS[verdict.metric], verdict.gain
    ours = part.contenders[0] if of is None else find(part, of)
    base = value(find(part, verdict.against), verdict.metric)
    against = "today" if is_today(verdict.against) else verdict.against.replace("/", ", ")
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


def is_today(label: str) -> bool:
    """Whether a label is that of what runs without a plan."""
    name, _, dispatch_model = label.rpartition("/")
    return label == TODAY or (dispatch_model == "standard" and name.startswith("contiguous without "))


def answer(plan: Plan) -> str:
    """Whether a plan pays, and by how much, on which samples."""
    verdict, evaluation = plan.verdict, plan.evaluation
    if verdict is None or evaluation is None:
        return "not judged"
    gain = gain_words(verdict, evaluation.judging)
    if plan.strategies == ("contiguous",):
        return f"the baseline that others are held against: {gain}, {_samples(plan)}"
    if verdict.value == "benefit":
        return f"benefit: {gain}, {_samples(plan)}"
    if verdict.gain.low is None:
        return f"no benefit shown: {gain}; one step shows nothing: --samples-per-step, or record more"
    return f"no benefit expected: {gain}{short_of(verdict)}, {_samples(plan)}"


def short_of(verdict: Verdict) -> str:
    """Threshold that a positive gain must reach to pay, in words. Empty where there is none."""
    if not verdict.at_least or verdict.gain.value <= 0:
        return ""
    return f"; below {verdict.at_least:.0%} it does not pay for moving samples"


def standing(verdict: Verdict, *, paid_when_solved: bool) -> str:
    """Whether a plan pays on a trace that it is compared on."""
    if verdict.value == "benefit":
        return "pays"
    if verdict.gain.low is None:
        return "not shown to pay (one step or sample shows nothing)"
    return "no longer pays" if paid_when_solved else "does not pay"


def _samples(plan: Plan) -> str:
    """Who judges."""
    assert plan.evaluation is not None
    part, unit = plan.evaluation.judging, plan.options.get("evaluation", {}).get("unit", "sample")
    number = part.num_steps if unit == "step" else part.num_samples
    seen = "unseen" if plan.evaluation.held_out else "fitted"
    return f"on {number:,} {seen} {unit}{'s' * (number != 1)}"
