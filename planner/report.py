"""What `solve` and `show` print of a plan."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.plan import Contender, Metric, Part, Plan
from ..solvers.outcome import Outcome

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["contender_table", "show_report", "solve_report"]

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


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


def contender_table(part: Part, title: str, *, several_nodes: bool) -> "Table":
    """Contenders side by side; columns that somebody has a metric for, those of nodes where there are several."""
    from rich.table import Table

    hidden = () if several_nodes else ("node_copies", "node_hops_kept", "inter_bytes")
    columns = [
        column
        for column in _COLUMNS
        if column[1] not in hidden and any(column[1] in contender.metrics for contender in part.contenders)
    ]
    table = Table(title, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for header, *_ in columns:
        table.add_column(header, justify="right")
    for contender in part.contenders:
        cells = [_cell(contender, name, form) for _, name, form in columns]
        table.add_row(f"{contender.name}, {contender.dispatch_model}", *cells)
    return table


def placement_picture(plan: Plan, width: int) -> Iterable[str]:
    """One row a layer, one sign an expert: the device it lives on (`*`: several)."""
    placement = plan.placement
    if placement is None:
        return
    per_row = max(width - 12, 16)
    yield ""
    yield f"where experts live: column = expert, sign = device ({placement.num_devices} devices), * = replicated"
    for layer in range(placement.num_layers):
        held_ED = placement.holds(layer)
        signs = "".join(_sign(row.nonzero()[0].tolist()) for row in held_ED)
        for start in range(0, len(signs), per_row):
            label = f"layer {layer:<4}" if start == 0 else " " * 10
            yield f"{label}  {signs[start : start + per_row]}"


def _sign(devices: list[int]) -> str:
    if len(devices) > 1:
        return "*"
    return DIGITS[devices[0] % len(DIGITS)]


def _print_inputs(plan: Plan, console: "Console") -> None:
    model, source = plan.model, plan.inputs.trace
    console.print(
        f"model     {model.name}: {model.num_layers} MoE layers x {model.num_experts} experts, top-{model.top_k};"
        f" cluster {plan.cluster}"
    )
    if source is not None and plan.evaluation is not None:
        held_out = plan.evaluation.held_out
        unit = plan.options.get("evaluation", {}).get("unit", "sample")
        held = f"held out {held_out.num_samples}" if held_out else "nothing held out"
        split = f"{unit}s: fit {plan.evaluation.fit.num_samples}, {held}"
        console.print(f"trace     {source.path}  {source.num_tokens:,} tokens; {split}")


def _print_outcomes(plan: Plan, console: "Console") -> None:
    for outcome in plan.outcome.values():
        console.print(f"solved    {outcome.wall_s:.1f} s, {outcome.status}: {_objective(outcome)}")


def _objective(outcome: Outcome) -> str:
    """The objective's value on the fitted samples, its bound and its kind."""
    objective = outcome.objective
    words, form = _OBJECTIVES.get(objective.name, (objective.name, ".3f"))
    value = f"{words} {objective.value:{form}}"
    if outcome.bound is None:
        return f"{value} (no bound)"
    limit = "at most" if objective.sense == "max" else "at least"
    return f"{value} of {limit} {outcome.bound:{form}} ({outcome.bound_kind} bound, gap {outcome.gap:.1%})"


def _print_evaluation(plan: Plan, console: "Console") -> None:
    if plan.evaluation is None:
        return
    part = plan.evaluation.held_out or plan.evaluation.fit
    console.print()
    title = "held out" if plan.evaluation.held_out else "fitted (nothing held out)"
    console.print(contender_table(part, title, several_nodes=plan.cluster.num_nodes > 1))
    console.print()
    for line in [*_verdict(plan), *_balance_price(part), *_coherence_price(plan, part)]:
        console.print(line)
    if part.dropped_samples:
        console.print(
            f"balance is over {part.num_steps} whole steps; the last {part.dropped_samples} samples fill none"
        )


def _verdict(plan: Plan) -> Iterable[str]:
    verdict = plan.verdict
    if verdict is None:
        return
    name, _, dispatch = verdict.against.partition("/")
    against = f"{name}, {dispatch}"
    if verdict.value == "none":
        yield f"no benefit expected: {verdict.metric} gains {_range(verdict.gain)} over {against}"
    elif verdict.metric == "device_copies":
        yield f"benefit expected: {_range(verdict.gain)} fewer copies a token and layer than {against}"
    else:
        yield f"benefit expected: {verdict.metric} lower by {_range(verdict.gain)} than {against}"


def _range(gain: Metric) -> str:
    if gain.low is None or gain.high is None:
        return f"{gain.value:.3f} (no interval)"
    return f"{gain.value:.3f} ({gain.low:.3f} to {gain.high:.3f}, 95 %)"


def _balance_price(part: Part) -> Iterable[str]:
    ours, base = (contender.metrics.get("balance") for contender in _ours_and_base(part))
    if ours and base and ours.value > base.value:
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
    saved = base.metrics["device_copies"].value - ours.metrics["device_copies"].value
    even = saved / (plan.cluster.num_devices - 1)
    kv_size, hidden = plan.model.attention.kv_size, plan.model.hidden_size
    yield f"coherence gathers K and V on every device: it moves fewer bytes in all while kv/d is below {even:.2f}"
    if kv_size and hidden:
        word = "below: it pays" if kv_size / hidden < even else "above: the K and V cost more than the copies saved"
        cost = f", {ours.metrics['kv_bytes'].value / 1e6:.2f} MB a step" if "kv_bytes" in ours.metrics else ""
        yield f"this model's kv/d is {kv_size / hidden:.2f}{cost} ({word})"
    else:
        yield "this model's kv/d is not in the trace (2 for MHA, 0.5 for Mixtral's GQA, 0.08 for DeepSeek's MLA)"


def _ours_and_base(part: Part) -> tuple[Contender, Contender]:
    """The plan, and what engines do without one."""
    base = next(c for c in part.contenders if (c.name, c.dispatch_model) == ("contiguous", "standard"))
    return part.contenders[0], base


def _cell(contender: Contender, name: str, form: str) -> str:
    metric = contender.metrics.get(name)
    if metric is None:
        return "-"
    if form == "balance":
        p95 = contender.metrics.get("balance_p95")
        return f"{metric.value:.2f} ({p95.value:.2f})" if p95 else f"{metric.value:.2f}"
    if form == "MB":
        return f"{metric.value / 1e6:.3g}"
    return f"{metric.value:{form}}"


_OBJECTIVES = {
    "hops_kept": ("hops kept", ".1%"),
    "hop_cost": ("a transition costs, in hops inside a node,", ".3f"),
}
_COLUMNS = (
    ("copies", "device_copies", ".2f"),
    ("node copies", "node_copies", ".2f"),
    ("hops kept", "hops_kept", ".1%"),
    ("on node", "node_hops_kept", ".1%"),
    ("balance (p95)", "balance", "balance"),
    ("MB/step", "intra_bytes", "MB"),
    ("MB/step between nodes", "inter_bytes", "MB"),
    ("K/V MB/step", "kv_bytes", "MB"),
)
