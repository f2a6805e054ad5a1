"""What `solve` and `show` print of a plan."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError
from ..runtime.plan import Contender, Metric, Part, Plan
from ..solvers.outcome import Outcome
from ..solvers.placement import Placement
from .picture import placement_picture

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["show_report", "solve_report"]


def solve_report(plan: Plan, path: Path, console: "Console") -> None:
    """What was read, what was done with its bound, held-out figures beside baselines, what it costs, what is next."""
    _print_inputs(plan, console)
    _print_outcomes(plan, console)
    _print_evaluation(plan, console)
    console.print(f"wrote     {path}    next: moeplan apply {path}")


def show_report(plan: Plan, path: Path, console: "Console") -> None:
    """The plan on a screen: origin, outcome, tables, and a picture of its placement."""
    console.print(
        f"plan      {path}  {', '.join(plan.strategies)}  {plan.plan_sha256[:12]}  {plan.created_at:%Y-%m-%d}"
    )
    _print_inputs(plan, console)
    _print_outcomes(plan, console)
    _print_evaluation(plan, console)
    for line in placement_picture(plan, console.width):
        console.print(line)


def _print_inputs(plan: Plan, console: "Console") -> None:
    model, source = plan.model, plan.inputs.trace
    slots = "" if (placed := plan.placement) is None else _slots(placed)
    console.print(
        f"model     {model.name}: {model.num_layers} MoE layers x {model.num_experts} experts, top-{model.top_k};"
        f" cluster {plan.cluster}{slots}"
    )
    if source is not None and plan.evaluation is not None:
        held_out = plan.evaluation.held_out
        unit = plan.options.get("evaluation", {}).get("unit", "sample")
        held = f"held out {held_out.num_samples}" if held_out else "nothing held out"
        split = f"{unit}s: fit {plan.evaluation.fit.num_samples}, {held}"
        console.print(f"trace     {source.path}  {source.num_tokens:,} tokens; {split}")


def _slots(placement: Placement) -> str:
    """What the slots are, where they are more than one an expert."""
    if not placement.has_replicas:
        return ""
    extra = placement.num_slots - placement.num_experts
    more = extra / placement.num_experts
    return f", {placement.num_slots} slots a layer: {extra} replicas, {more:.0%} more expert memory"


def _print_outcomes(plan: Plan, console: "Console") -> None:
    for outcome in plan.outcome.values():
        console.print(f"solved    {outcome.wall_s:.1f} s, {outcome.status}: {_objective(outcome)}")


def _objective(outcome: Outcome) -> str:
    """The objective's value on the fitted samples, its bound and its kind."""
    objective = outcome.objective
    words, form = _OBJECTIVES.get(objective.name, (objective.name, ".3f"))
    value = f"{words} {objective.value:{form}}"
    if outcome.bound is None or outcome.gap is None:
        return f"{value} (no bound)"
    limit = "at most" if objective.sense == "max" else "at least"
    return f"{value} of {limit} {outcome.bound:{form}} ({outcome.bound_kind} bound, gap {outcome.gap:.1%})"


def _print_evaluation(plan: Plan, console: "Console") -> None:
    if plan.evaluation is None:
        return
    part = plan.evaluation.held_out or plan.evaluation.fit
    title = "held out" if plan.evaluation.held_out else "fitted"
    console.print()
    several_nodes = plan.cluster.num_nodes > 1
    console.print(_contender_table(part, title, several_nodes=several_nodes))
    console.print(_LEGEND_OF_NODES if several_nodes else _LEGEND)
    console.print()
    lines = [*_verdict(plan), *_split_gain(part), *_balance_price(part), *_coherence_price(plan, part)]
    for line in [*lines, *_steps(plan, part)]:
        console.print(line)


def _contender_table(part: Part, title: str, *, several_nodes: bool) -> "Table":
    """Contenders side by side; columns that somebody has a metric for, those of nodes where there are several."""
    from rich.table import Table

    hidden = () if several_nodes else ("node_copies", "node_hops_kept", "inter_bytes")
    columns = [
        column
        for column in _COLUMNS
        if column[1] not in hidden and any(column[1] in contender.metrics for contender in part.contenders)
    ]
    gap = 1 if several_nodes else 2  # more columns must fit 80 signs
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="")
    table.add_column(title, no_wrap=True)
    for header, *_ in columns:
        table.add_column(header, justify="right")
    for contender in part.contenders:
        cells = [_cell(contender, name, form) for _, name, form in columns]
        table.add_row(f"{contender.name}, {contender.dispatch_model}", *cells)
    return table


def _verdict(plan: Plan) -> Iterable[str]:
    verdict = plan.verdict
    if verdict is None:
        return
    if plan.evaluation is not None and plan.evaluation.held_out is None:
        yield "judged on the very samples it was fitted to, because nothing was held out: expect less on others"
    against = verdict.against.replace("/", ", ")
    if verdict.value == "none" and verdict.gain.low is None:
        yield f"no benefit shown: {verdict.metric} gains {_range(verdict.gain)}; one step shows nothing, record more"
    elif verdict.value == "none":
        yield f"no benefit expected: {verdict.metric} gains {_range(verdict.gain)} over {against}"
    elif verdict.metric == "device_copies":
        yield f"benefit expected: {_range(verdict.gain)} fewer copies than {against}"
    else:
        yield f"benefit expected: {verdict.metric} lower by {_range(verdict.gain)} than {against}"


def _split_gain(part: Part) -> Iterable[str]:
    """What of a coherent plan's copies is the placement's doing, and what coherence's."""
    ours = part.contenders[0]
    if ours.dispatch_model != "coherent":
        return
    home, stays = _find(part, "contiguous/standard"), _find(part, "contiguous/coherent")
    coherence = _value(home, "device_copies") - _value(stays, "device_copies")
    placement = _value(stays, "device_copies") - _value(ours, "device_copies")
    yield f"of these, {coherence:.3f} come from coherence alone and {placement:.3f} from the placement"


def _steps(plan: Plan, part: Part) -> Iterable[str]:
    options = plan.options.get("evaluation", {})
    unit = options.get("unit", "sample")
    if options.get("step") == "derived" and part.num_samples < options.get("samples_per_step", 0):
        yield f"balance and MB are of one incomplete step of {part.num_samples} {unit}s (--samples-per-step)"
    elif part.dropped_samples:
        yield f"balance is over {part.num_steps} whole step(s); the last {part.dropped_samples} {unit}(s) fill none"


def _range(gain: Metric) -> str:
    if gain.low is None or gain.high is None:
        return f"{gain.value:.3f} (no interval)"
    return f"{gain.value:.3f} ({gain.low:.3f} to {gain.high:.3f}, 95 %)"


def _balance_price(part: Part) -> Iterable[str]:
    ours, base = (contender.metrics.get("balance") for contender in _ours_and_base(part))
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
    ours, base = _ours_and_base(part)
    if ours.dispatch_model != "coherent":
        return
    saved = _value(base, "device_copies") - _value(ours, "device_copies")
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
    ours, base = _ours_and_base(part)
    stays, theirs, back = (
        sum(_value(one, f"{kind}_bytes") for kind in ("intra", "inter"))
        for one in (ours, base, _find(part, "plan/standard"))
    )
    kv = _value(ours, "kv_bytes")
    summed = f"{_megabytes(stays)} + {_megabytes(kv)} = {_megabytes(stays + kv)} MB a step in coherent"
    line = f"in all {summed}, against {_megabytes(theirs)} of contiguous and {_megabytes(back)} of the plan in standard"
    return line + ("; in standard it moves least" if back < min(stays + kv, theirs) else "")


def _ours_and_base(part: Part) -> tuple[Contender, Contender]:
    """The plan, and what engines do without one."""
    return part.contenders[0], _find(part, "contiguous/standard")


def _find(part: Part, label: str) -> Contender:
    for contender in part.contenders:
        if contender.label == label:
            return contender
    raise InputError(f"the plan's evaluation lacks {label}; re-run moeplan solve")


def _value(contender: Contender, metric: str) -> float:
    if metric not in contender.metrics:
        raise InputError(f"the plan's evaluation of {contender.name} lacks {metric}; re-run moeplan solve")
    return contender.metrics[metric].value


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.3g}" if value < 1e9 else f"{value / 1e6:,.0f}"


def _cell(contender: Contender, name: str, form: str) -> str:
    metric = contender.metrics.get(name)
    if metric is None:
        return "-"
    if form == "balance":
        p95 = contender.metrics.get("balance_p95")
        return f"{metric.value:.2f} ({p95.value:.2f})" if p95 else f"{metric.value:.2f}"
    if form == "MB":
        return _megabytes(metric.value)
    return f"{metric.value:{form}}"


_LEGEND = (
    "copies: hidden vectors to other devices, a token and layer; kept: hops that stay on the device; balance: busiest"
    " device over the mean, over layers and steps (95th percentile); MB a step: hidden vectors, K and V"
)
_LEGEND_OF_NODES = (
    "copies: hidden vectors to other devices (nodes: nodes), a token and layer; kept: hops that stay on the device (on"
    " node: node); balance: busiest device over the mean, over layers and steps (95th percentile); MB a step: hidden"
    " vectors inside nodes, between nodes (inter), K and V"
)
_OBJECTIVES = {
    "hops_kept": ("hops kept", ".1%"),
    "hop_cost": ("a transition costs, in hops inside a node,", ".3f"),
    "expected_hops_kept": ("hops kept, as expected with replicas,", ".1%"),
    "expected_hop_cost": ("a transition costs, as expected with replicas, in hops inside a node,", ".3f"),
}
_COLUMNS = (
    ("copies", "device_copies", ".2f"),
    ("nodes", "node_copies", ".2f"),
    ("kept", "hops_kept", ".1%"),
    ("on node", "node_hops_kept", ".1%"),
    ("balance (p95)", "balance", "balance"),
    ("MB", "intra_bytes", "MB"),
    ("inter", "inter_bytes", "MB"),
    ("K/V", "kv_bytes", "MB"),
)
