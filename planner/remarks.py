"""What is said below a plan's tables: the verdict, what its gain is made of, and what it costs."""

from collections.abc import Callable, Iterable

from ..runtime.plan import Metric, Part, Plan, Verdict
from .contender_table import megabytes
from .part import find, ours_and_base, value
from .pipeline_report import pipeline_remarks
from .seconds_report import TimeUnit

__all__ = ["remarks"]


def remarks(plan: Plan, part: Part) -> Iterable[str]:
    """The verdict of a plan and the prices of the part that judges it, line by line."""
    yield from _verdict(plan, part)
    if plan.decisions.pipeline is not None:
        yield from pipeline_remarks(plan, part)
    elif plan.decisions.sample_policy is None:
        yield from _split_gain(part)
        yield from _balance_price(part)
        yield from _coherence_price(plan, part)
    yield from _steps(plan, part)


def _verdict(plan: Plan, part: Part) -> Iterable[str]:
    verdict = plan.verdict
    if verdict is None:
        return
    if plan.evaluation is not None and plan.evaluation.held_out is None:
        yield "judged on the very samples it was fitted to, because nothing was held out: expect less on others"
    against = verdict.against.replace("/", ", ")
    gain = _gain(verdict, part)
    if verdict.value == "none" and verdict.gain.low is None:
        yield f"no benefit shown: {gain} than {against}; one step shows nothing, record more"
    elif verdict.value == "none":
        yield f"no benefit expected: {gain} than {against}"
    else:
        yield f"benefit expected: {gain} than {against}"


def _gain(verdict: Verdict, part: Part) -> str:
    """How much less of its metric the plan has."""
    if verdict.metric == "device_copies":
        return f"{_range(verdict.gain)} fewer copies"
    if verdict.metric == "inter_bytes":
        return f"{_range(verdict.gain, megabytes, ' MB')} a step fewer between nodes"
    if verdict.metric != "step_s":
        return f"{verdict.metric} lower by {_range(verdict.gain)}"
    unit, gain, word = TimeUnit.of(part), verdict.gain, "less"
    if gain.value < 0 and gain.low is not None and gain.high is not None:
        gain, word = Metric(value=-gain.value, low=-gain.high, high=-gain.low), "more"
    return f"a step takes {_range(gain, unit.text, f' {unit.name}')} {word}"


def _split_gain(part: Part) -> Iterable[str]:
    """What of a coherent plan's copies is the placement's doing, and what coherence's."""
    ours = part.contenders[0]
    if ours.dispatch_model != "coherent":
        return
    home, stays = find(part, "contiguous/standard"), find(part, "contiguous/coherent")
    coherence = value(home, "device_copies") - value(stays, "device_copies")
    placement = value(stays, "device_copies") - value(ours, "device_copies")
    yield (
        f"of {coherence + placement:.3f} copies saved, {coherence:.3f} come from coherence alone and {placement:.3f}"
        " from the placement"
    )


def _balance_price(part: Part) -> Iterable[str]:
    ours, base = (contender.metrics.get("balance") for contender in ours_and_base(part))
    if ours and base and ours.value > 1.01 * base.value:
        yield (
            f"costs balance: the busiest device carries {ours.value:.2f} times the mean (contiguous {base.value:.2f})"
        )


def _coherence_price(plan: Plan, part: Part) -> Iterable[str]:
    """What coherence costs in K and V, and the kv/d up to which it moves fewer bytes than tokens that return home.

    Notes
    -----
    A token and layer moves, in hidden vectors, c_standard copies when tokens return home, and c_coherent + (D-1) kv/d
    when K and V are gathered; equal at kv/d = (c_standard - c_coherent) / (D - 1) (SYSTEMS, KV cache).
    """
    ours, base = ours_and_base(part)
    if ours.dispatch_model != "coherent":
        return
    saved = value(base, "device_copies") - value(ours, "device_copies")
    even = saved / (plan.cluster.num_devices - 1)
    kv_size, hidden = plan.model.attention.kv_size, plan.model.hidden_size
    yield f"coherence gathers K and V on every device: it moves fewer bytes in all while kv/d is below {even:.2f}"
    if not (kv_size and hidden):
        yield "this model's kv/d is not in the trace (2 for MHA, 0.5 for Mixtral's GQA, 0.08 for DeepSeek's MLA);"
        yield "import it with --hidden-size and --kv-size to see which side it is on"
        return
    yield f"this model's kv/d is {kv_size / hidden:.2f}"
    if kv_size / hidden >= even:
        yield "NO BENEFIT IN BYTES: K and V cost more than the copies save; use --dispatch standard, or fewer devices"
    if "kv_bytes" in ours.metrics and "intra_bytes" in ours.metrics:
        yield _bytes_in_all(part)


def _bytes_in_all(part: Part) -> str:
    """What the plan moves a step with K and V, beside contiguous and itself in standard."""
    ours, base = ours_and_base(part)
    stays, theirs, back = (
        sum(value(one, f"{kind}_bytes") for kind in ("intra", "inter"))
        for one in (ours, base, find(part, "plan/standard"))
    )
    kv = value(ours, "kv_bytes")
    summed = f"{megabytes(stays)} + {megabytes(kv)} = {megabytes(stays + kv)} MB a step in coherent"
    line = f"in all {summed}, against {megabytes(theirs)} of contiguous and {megabytes(back)} of the plan in standard"
    return line + ("; in standard it moves least" if back < min(stays + kv, theirs) else "")


def _steps(plan: Plan, part: Part) -> Iterable[str]:
    options = plan.options.get("evaluation", {})
    unit = options.get("unit", "sample")
    one, all_ = ("seconds are", "seconds are") if plan.decisions.pipeline else ("balance and MB are", "balance is")
    if options.get("step") == "derived" and part.num_samples < options.get("samples_per_step", 0):
        yield f"{one} of one incomplete step of {part.num_samples} {unit}s (--samples-per-step)"
    elif part.dropped_samples:
        yield f"{all_} over {part.num_steps} whole step(s); the last {part.dropped_samples} {unit}(s) fill none"


def _range(gain: Metric, form: Callable[[float], str] = "{:.3f}".format, unit: str = "") -> str:
    if gain.low is None or gain.high is None:
        return f"{form(gain.value)}{unit} (no interval)"
    return f"{form(gain.value)}{unit} ({form(gain.low)} to {form(gain.high)}, 95 %)"
