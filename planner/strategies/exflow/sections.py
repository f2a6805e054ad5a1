"""Screen and page of an exflow plan: savings by coherence and by placement, the search, the cost of re-planning."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ....runtime.plan import Contender, Part, Plan
from ....solvers.moves import experts_moved
from ....traces.counts import count
from ...document import Section, Text
from ...evaluate.journey import today
from ...evaluate.metrics import BALANCE, COPIES, NODE_COPIES
from ...figures import bytes_text, contender_of, figure_of, named, percent
from ...picture import BLUE, CYAN, GREEN, GREY, OCHRE, ORANGE, VIOLET, Axis, Heat, Line, Plot, group_size, grouped
from ..placement_options import PlacementOptions
from .options import Replanned, paid_back_tokens

if TYPE_CHECKING:
    from ...task import Task

MAPS = 4  # pairs of layers that are drawn
COLOURS = (BLUE, ORANGE, GREEN, VIOLET, CYAN)  # of contenders but today


def remarks(plan: Plan, part: Part) -> Iterator[str]:
    """Remarks on replacing the plan in force, on what saves how much, and on what would save more."""
    options = PlacementOptions.of(plan)
    if options.replanned is not None:
        yield _replanned(options.replanned)
    assert plan.verdict is not None
    ours, base = part.contenders[0], contender_of(part, plan.verdict.against)
    if ours.dispatch_model == "coherent":
        stays = next(one for one in part.contenders[1:] if one.dispatch_model == "coherent")
        coherence, placement = (
            figure_of(base, COPIES) - figure_of(stays, COPIES),
            figure_of(stays, COPIES) - figure_of(ours, COPIES),
        )
        alike = "" if placement > 0 else ": contiguous experts with coherence save as much"
        yield (
            f"of {coherence + placement:.3f} copies saved, {coherence:.3f} come from coherence alone and"
            f" {placement:.3f} from the placement{alike}"
        )
        yield _even_kv(plan, ours, base)
    elif plan.cluster.num_nodes > 1 and plan.verdict.metric == NODE_COPIES:
        yield (
            "engines that send a token once per node (DeepEP) save this; moeplan.runtime sends one per device:"
            f" {figure_of(ours, COPIES):.2f} per token and layer (today {figure_of(base, COPIES):.2f})"
        )
    elif plan.cluster.num_nodes > 1:
        yield (
            f"an engine that sends a token once per node (DeepEP) makes {figure_of(ours, NODE_COPIES):.2f} copies to"
            f" nodes (today {figure_of(base, NODE_COPIES):.2f}) per token and layer"
        )
    hops = options.search is not None and options.search.objective == "hops"
    if hops and plan.model.top_k > 1 and ours.dispatch_model == "coherent":
        yield f"only the first choice of each token was considered; --objective copies considers all {plan.model.top_k}"


def sections(plan: Plan, width: int) -> Iterator[Section]:
    """The hops after each stage of the search, why a bound is not thorough, and what a cap costs."""
    if (search := PlacementOptions.of(plan).search) is None:
        return
    lines = [f"no thorough bound of what stays on a {level}: {reason}" for level, reason in search.simple.items()]
    what = "pairs apart" if search.objective == "copies" else "hops"
    lines += [
        f"{stage.name:<9} {percent(stage.inter_hops, 1)} {what} between nodes,"
        f" {percent(stage.intra_hops, 1)} inside them"
        for stage in search.stages
    ]
    if (cap := search.cap) is not None:
        lines.append(
            f"capped    at {cap.max_load:g} of a layer's mean load per device; without, in less time,"
            f" {cap.objective_without:.4g} with up to {cap.highest_without:.3g}"
        )
    if lines:
        yield Section("Search", (Text(tuple(lines)),), verbose=True)


def pictures(plan: Plan, folder: Path, task: "Task | None") -> Iterator[Section]:
    """Copies against balance, and transitions between experts."""
    yield from _price(plan)
    yield from _transitions(plan, task)


def _price(plan: Plan) -> Iterator[Section]:
    """Copies of contenders against their balance, and the tokens after which the plan's pay for the experts moved."""
    placement, evaluation, verdict = plan.placement, plan.evaluation, plan.verdict
    if placement is None or evaluation is None or verdict is None:
        return
    part = evaluation.judging
    rows = [one for one in part.contenders if {COPIES, BALANCE} <= one.metrics.keys()]
    base, colours, dots = contender_of(part, verdict.against), iter(COLOURS), list[Line]()
    if base not in rows or part.contenders[0] not in rows:
        return
    for one in rows:
        colour = GREY if one is base else next(colours, OCHRE)
        point = [figure_of(one, COPIES)], [figure_of(one, BALANCE)]
        dots.append(Line(*point, named(one, part, verdict.against), colour, "dots"))
    copies = figure_of(rows[0], COPIES)
    x = Axis("copies to other devices per token and layer", ends=_ends(rows, COPIES))
    y = Axis("busiest device over the mean", ends=_ends(rows, BALANCE))
    in_force = today(plan.model, plan.cluster, placement.slots).journey.placement
    moved = int(experts_moved(placement, in_force).sum())
    after = paid_back_tokens(moved, figure_of(base, COPIES) - copies, plan.model)
    text = f"{moved:,} of {placement.num_slots * placement.num_layers:,} experts live elsewhere than today"
    if after is not None:
        text += f"; the copies that {after:,.0f} tokens save weigh as much as they do"
    yield Section("The price of fewer copies", (Text.of(f"{text}."), Plot("", dots, x, y, [(copies, "chosen")])))


def _ends(rows: Sequence[Contender], metric: str) -> tuple[float, float]:
    """Ends of an axis with room around all figures."""
    values = [figure_of(one, metric) for one in rows]
    room = 0.1 * (max(values) - min(values)) or 0.1
    return min(values) - room, max(values) + room


def _transitions(plan: Plan, task: "Task | None") -> Iterator[Section]:
    """Transitions between experts, in their own order and as the plan places them, in a few layers."""
    placement, title = plan.placement, "Transitions between experts"
    if task is None or placement is None or plan.model.num_layers < 2:
        return
    if placement.has_replicas:
        yield Section(title, (Text.of("not drawn: an expert with replicas is on several devices"),))
        return
    table_LEE = count(task.trace, pairs="top1", phases=task.request.phases or None).transitions
    layers = np.unique(np.linspace(0, len(table_LEE) - 1, MAPS).round().astype(int)).tolist()
    in_force = today(plan.model, plan.cluster, placement.slots).journey.placement
    placements = {"today": in_force, "plan": placement}
    size, heats = group_size(plan.model.num_experts, len(layers) * len(placements)), list[Heat]()
    for layer in layers:
        for name, one in placements.items():
            rows, columns = (np.argsort(one.holds(at).argmax(axis=1), kind="stable") for at in (layer, layer + 1))
            table = grouped(table_LEE[layer][np.ix_(rows, columns)], size)
            shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
            borders = (np.cumsum(one.slots)[:-1] / size).tolist()
            heats.append(Heat(f"{layer} to {layer + 1}, {name}", shares, 0, borders=borders, small=True))
    top = max(float(heat.table.max()) for heat in heats)
    text = (
        "Of the tokens whose first choice is the row's expert, the share that goes on to the column's in the next"
        f" layer; all tokens of the trace, {len(layers)} of {len(table_LEE)} pairs of layers. Lines part devices: in a"
        f" square on the diagonal tokens stay on their device. Strongest colour: {percent(top)}."
    )
    if size > 1:
        text += f" Rows and columns are groups of {size} experts."
    yield Section(title, (Text.of(text), *(replace(heat, top=top) for heat in heats)))


def _even_kv(plan: Plan, ours: Contender, base: Contender) -> str:
    """The size of K and V up to which coherence moves fewer bytes than tokens that return home.

    Notes
    -----
    Per token and layer, in hidden vectors, c_standard copies move when tokens return home, and c_coherent + (D-1) kv/d
    when K and V are gathered; equal at kv/d = (c_standard - c_coherent) / (D - 1).
    """
    kv_size, hidden = plan.model.attention.kv_size, plan.model.hidden_size
    even = (figure_of(base, COPIES) - figure_of(ours, COPIES)) / (plan.cluster.num_devices - 1)
    limit = (
        f"while K and V of a token are below {even:.2f} of its hidden vector"
        if even > 0
        else "never: there are no fewer copies"
    )
    if kv_size and hidden:
        known = f"they are {kv_size / hidden:.2f}"
    else:
        known = (
            "they are not in the trace (2 for MHA, 0.5 for Mixtral's GQA, 0.08 for DeepSeek's MLA): import it with"
            " --hidden-size and --kv-size"
        )
    return f"coherence moves fewer bytes {limit}; in this model {known}"


def _replanned(cost: Replanned) -> str:
    """Cost of replacing the plan in force, and whether that is worth it."""
    size = "" if cost.bytes_moved is None else f" ({bytes_text(cost.bytes_moved)})"
    weighed = "" if cost.horizon_tokens is None else f", weighed over {cost.horizon_tokens:,.0f} tokens"
    moved = f"{cost.experts_moved:,} of {cost.experts_held:,} experts move{size}{weighed}"
    if not cost.experts_moved:
        return "keep the plan in force: no move is worth its price"
    if cost.verdict.value == "none":
        return f"keep the plan in force: this one is no better, although {moved}"
    back = "" if cost.paid_back_tokens is None else f", paid back after {cost.paid_back_tokens:,.0f} tokens"
    return f"worth replacing the plan in force: {moved}{back}"
