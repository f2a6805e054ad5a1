"""What is said below a plan's tables: the verdict, what its gain is made of, and what it costs."""

from collections.abc import Callable, Iterable

from ...runtime.plan import Contender, Metric, Part, Plan, Verdict
from ..netmoe.report import SAVED, dealt_lines
from ..options import Replanned, Search, parsed
from ..pipeline.report import one_piece, pipeline_price, pipeline_remarks
from ..tables.contenders import megabytes
from ..tables.part import find, ours_and_base, value
from ..tables.seconds import TimeUnit

__all__ = ["COPIES", "LITTLE", "gain_words", "remarks", "slower_exchange", "stays_in_force", "verdict_lines"]

COPIES = {"device_copies": "copies", "node_copies": "copies to nodes"}
EXCHANGES = {"dispatch_s": "dispatch", "combine_s": "combine", "kv_s": "K and V"}
LITTLE = 0.01  # longer is not worth mention
FEW_STEPS = 10  # an interval from so few says little of others


def remarks(plan: Plan, part: Part) -> Iterable[str]:
    """The verdict of a plan and the prices of the part that judges it, line by line."""
    yield from verdict_lines(plan)
    if plan.decisions.sample_policy is not None:
        yield from dealt_lines(plan, part)
    if plan.decisions.pipeline is not None and not plan.judges_pipeline:
        yield "figures are of whole layers: what the degrees give was judged in the plan they came from"
    if plan.judges_pipeline:
        yield from pipeline_remarks(plan, part)
    elif plan.decisions.sample_policy is None:
        yield from _split_gain(plan, part)
        yield from _node_copies(plan, part)
        yield from _balance_price(plan, part)
        yield from _coherence_price(plan, part)
    yield from _replanned(plan, part)
    yield from _steps(plan, part)


def gain_words(verdict: Verdict, part: Part) -> str:
    """How much less, or more, of its metric the plan has; as a share where that must reach one to pay."""
    gain, lost = verdict.gain, verdict.gain.value < 0
    if lost:
        low, high = (None if end is None else -end for end in (gain.high, gain.low))
        gain = Metric(value=-gain.value, low=low, high=high)
    if verdict.at_least and (base := value(find(part, verdict.against), verdict.metric)) > 0:
        share = _range(gain, lambda x: f"{100 * x / base:.1f}", "%")
        return f"{share} {'more' if lost else 'fewer'} {SAVED.get(verdict.metric, verdict.metric)}"
    if verdict.metric in COPIES:
        return f"{_range(gain)} {'more' if lost else 'fewer'} {COPIES[verdict.metric]}"
    if verdict.metric == "inter_bytes":
        return f"{_range(gain, megabytes, ' MB')} a step {'more' if lost else 'fewer'} between nodes"
    if verdict.metric != "step_s":
        return f"{verdict.metric} {'higher' if lost else 'lower'} by {_range(gain)}"
    unit = TimeUnit.of(part)
    return f"a step takes {_range(gain, unit.text, f' {unit.name}')} {'more' if lost else 'less'}"


def verdict_lines(plan: Plan) -> Iterable[str]:
    """Whether a plan pays, where that was judged."""
    if (verdict := plan.verdict) is None or plan.evaluation is None:
        return
    part = plan.evaluation.judging
    if plan.evaluation.held_out is None:
        yield "judged on the very samples it was fitted to, because nothing was held out: expect less on others"
    against = verdict.against.replace("/", ", ")
    gain = gain_words(verdict, part)
    if plan.strategies == ("contiguous",):
        yield "this is the baseline that others are held against"
    elif one_piece(plan):
        yield f"no benefit expected: one piece is taken in every layer, as by {against}{pipeline_price(part)}"
    elif verdict.value == "none" and verdict.gain.low is None:
        yield f"no benefit shown: {gain} than {against}; one step shows nothing: --samples-per-step, or record more"
    elif verdict.value == "none":
        yield f"no benefit expected: {gain} than {against}{_short_of(verdict, part)}{pipeline_price(part)}"
    elif verdict.metric == "device_copies" and _loses_bytes(plan, part):
        yield f"benefit in copies alone, NOT IN BYTES: {gain} than {against}, and more K and V than they save"
    else:
        yield f"benefit expected: {gain} than {against}{pipeline_price(part)}"
    if verdict.value == "benefit" and verdict.metric in COPIES:
        yield from slower_exchange(part.contenders[0], find(part, verdict.against))


def slower_exchange(plan: Contender, other: Contender) -> Iterable[str]:
    """What exchanges take, where a plan's fewer copies than those of another take longer all the same."""
    ours, theirs = (
        {name: one.metrics[name].value for name in EXCHANGES if name in one.metrics} for one in (plan, other)
    )
    ours_s, theirs_s = sum(ours.values()), sum(theirs.values())
    if {"dispatch_s", "combine_s"} <= ours.keys() & theirs.keys() and ours_s > theirs_s * (1 + LITTLE):
        parts, took = ", ".join(map(EXCHANGES.__getitem__, ours)), map(TimeUnit.worded, (ours_s, theirs_s))
        yield f"BUT {parts} take {' a step, against '.join(took)}: fewer copies, not faster"


def _short_of(verdict: Verdict, part: Part) -> str:
    """What a gain that is there does not pay for."""
    if not verdict.at_least or verdict.gain.value <= 0:
        return ""
    moved = value(part.contenders[0], "samples_moved")
    above = verdict.gain.value > verdict.at_least * value(find(part, verdict.against), verdict.metric)
    under = f"may be under {verdict.at_least:.0%}, which" if above else f"under {verdict.at_least:.0%}"
    return f"; {under} does not pay for moving {moved:.0%} of the samples at every layer"


def _split_gain(plan: Plan, part: Part) -> Iterable[str]:
    """What of a coherent plan's copies is the placement's doing, and what coherence's; what would save more."""
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
    if placement <= 0 and plan.strategies != ("contiguous",):
        yield "coherence needs no such plan: contiguous experts save as much"
    search = _search(plan)
    if search is not None and search.objective == "hops" and plan.model.top_k > 1:
        counted = f"--objective copies counts all {plan.model.top_k} experts of a token"
        yield f"placed to keep the hops of first choices; {counted}"


def _node_copies(plan: Plan, part: Part) -> Iterable[str]:
    """Who has what of a plan whose tokens return home over several nodes."""
    ours, base = ours_and_base(part)
    if ours.dispatch_model != "standard" or plan.cluster.num_nodes == 1 or not {*plan.strategies} & {"exflow"}:
        return
    judged = plan.verdict if plan.verdict is not None and plan.verdict.metric == "node_copies" else None
    metric = "device_copies" if judged else "node_copies"
    said = f"{value(ours, metric):.2f} a token and layer (contiguous {value(base, metric):.2f})"
    if judged:
        saved = "engines that send a token once a node (DeepEP) save this; " if judged.value == "benefit" else ""
        yield f"{saved}moeplan.runtime sends a copy to each device: {said}"
    else:
        yield f"an engine that sends a token once a node (DeepEP) makes {said} copies to nodes"


def _search(plan: Plan) -> Search | None:
    """How exflow came to a placement."""
    found = plan.options.get("placement", {}).get("search")
    return None if found is None else parsed(Search, found, "placement.search")


def _balance_price(plan: Plan, part: Part) -> Iterable[str]:
    """What balance is lost, and how to cap that where a cap can be given."""
    ours, base = (contender.metrics.get("balance") for contender in ours_and_base(part))
    if not ours or not base or ours.value <= 1.01 * base.value:
        return
    said = f"costs balance: the busiest device carries {ours.value:.2f} times the mean (contiguous {base.value:.2f})"
    if plan.strategies == ("exflow",) and plan.placement is not None and not plan.placement.has_replicas:
        search = _search(plan)
        cap = None if search is None else search.cap
        now = "" if cap is None else f", {cap.max_load:g} now"
        said += f"; --max-load caps that over all fitted samples{now}, single steps vary more"
    yield said


def _coherence_price(plan: Plan, part: Part) -> Iterable[str]:
    """What coherence costs in K and V, and the kv/d up to which it moves fewer bytes than tokens that return home."""
    ours, _ = ours_and_base(part)
    if ours.dispatch_model != "coherent":
        return
    even, kv_size, hidden = _even_kv(plan, part), plan.model.attention.kv_size, plan.model.hidden_size
    limit = f"while kv/d is below {even:.2f}" if even > 0 else "never: there are no fewer copies"
    yield f"coherence gathers K and V on every device: it moves fewer bytes in all {limit}"
    if not (kv_size and hidden):
        known = "2 for MHA, 0.5 for Mixtral's GQA, 0.08 for DeepSeek's MLA"
        yield f"this model's kv/d is not in the trace ({known}); import it with --hidden-size and --kv-size"
        return
    yield f"this model's kv/d is {kv_size / hidden:.2f}"
    if _loses_bytes(plan, part):
        yield "NO BENEFIT IN BYTES: K and V cost more than the copies save; use --dispatch standard, or fewer devices"
    if "kv_bytes" in ours.metrics and "intra_bytes" in ours.metrics:
        yield _bytes_in_all(part)


def _even_kv(plan: Plan, part: Part) -> float:
    """The kv/d at which coherence moves as many bytes as tokens that return home.

    Notes
    -----
    A token and layer moves, in hidden vectors, c_standard copies when tokens return home, and c_coherent + (D-1) kv/d
    when K and V are gathered; equal at kv/d = (c_standard - c_coherent) / (D - 1).
    """
    ours, base = ours_and_base(part)
    return (value(base, "device_copies") - value(ours, "device_copies")) / (plan.cluster.num_devices - 1)


def _loses_bytes(plan: Plan, part: Part) -> bool:
    """Whether K and V are known to cost a coherent plan more than its copies save."""
    kv_size, hidden = plan.model.attention.kv_size, plan.model.hidden_size
    coherent = part.contenders[0].dispatch_model == "coherent"
    return bool(coherent and kv_size and hidden and kv_size / hidden >= _even_kv(plan, part))


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


def stays_in_force(plan: Plan) -> bool:
    """Whether the plan in force is better kept than replaced by this one."""
    options = _replanning(plan)
    return options is not None and (not options.experts_moved or options.verdict.value == "none")


def _replanning(plan: Plan) -> Replanned | None:
    found = plan.options.get("placement", {}).get("replanned")
    return None if found is None else parsed(Replanned, found, "placement.replanned")


def _replanned(plan: Plan, part: Part) -> Iterable[str]:
    """What replacing the plan in force takes, and whether that is worth it."""
    if (options := _replanning(plan)) is None:
        return
    size = "" if options.bytes_moved is None else f" ({megabytes(options.bytes_moved)} MB)"
    weighed = "" if options.horizon_tokens is None else f", weighed over {options.horizon_tokens:,.0f} tokens"
    yield f"re-planned: {options.experts_moved:,} of {options.experts_held:,} experts move{size}{weighed}"
    if not options.experts_moved:
        yield "KEEP THE PLAN IN FORCE: no move is worth its price"
        return
    gain = gain_words(options.verdict, part)
    if options.verdict.value == "none":
        yield f"KEEP THE PLAN IN FORCE: no benefit over it, {gain}"
        return
    paid = (
        ""
        if options.paid_back_tokens is None
        else f"; the moves are paid back after {options.paid_back_tokens:,.0f} tokens"
    )
    yield f"worth moving: {gain} than the plan in force{paid}"
    if options.verdict.metric in COPIES:
        each = 1e6 * plan.model.num_layers * options.verdict.gain.value / options.experts_moved
        yield f"an expert moved saves {each:,.0f} copies a million tokens, in the mean"


def _steps(plan: Plan, part: Part) -> Iterable[str]:
    options = plan.options.get("evaluation", {})
    unit = options.get("unit", "sample")
    one, all_ = "balance and MB are", "balance is"
    if plan.judges_pipeline:
        one = all_ = "seconds are"
    elif plan.decisions.sample_policy is not None:
        one = all_ = "figures are"
        if 1 < part.num_steps < FEW_STEPS:
            derived = options.get("step") == "derived"
            how = ", or put fewer samples in each (--samples-per-step, which changes the figures)" if derived else ""
            yield f"judged on {part.num_steps} steps, which are few: record more{how}"
    if options.get("step") == "derived" and part.num_samples < options.get("samples_per_step", 0):
        yield f"{one} of one incomplete step of {part.num_samples} {unit}s (--samples-per-step)"
    elif part.dropped_samples:
        yield f"{all_} over {part.num_steps} whole step(s); the last {part.dropped_samples} {unit}(s) fill none"


def _range(gain: Metric, form: Callable[[float], str] = "{:.3f}".format, unit: str = "") -> str:
    if gain.low is None or gain.high is None:
        return f"{form(gain.value)}{unit} (no interval)"
    share = "" if unit else ", 95 %"  # seconds also hold the error of fits, which is a range
    return f"{form(gain.value)}{unit} ({form(gain.low)} to {form(gain.high)}{share})"
