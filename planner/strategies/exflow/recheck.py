"""Recheck of an exflow plan: the affinity its placement keeps, its cap, its stages and its bound.

Legend: L MoE layers; E experts; W tables of pairs of experts.
"""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ....errors import CertificationError
from ....runtime.plan import Plan
from ....solvers.bounds.pairs import kept_bound
from ....solvers.cost import inter_ratio
from ....solvers.outcome import Outcome
from ....solvers.placement import Placement
from ...certify.bounds import proven_shares
from ...certify.recounted import count_fitted
from ...options import PlacementOptions, Search
from ..placement import check_goal, check_groups, highest, placement_options
from ..strategy import Again, Check, Told

TOLERANCE = 1e-9
BOUND_TOLERANCE = 1e-6  # relative; bounds are rounded up to stay bounds
PAIRS = {"transportation", "spectral", "row"}  # of layers: what is proved again here
TIGHTER = {"transportation", "spectral", "two-layer", "three-layer"}
KINDS = PAIRS | TIGHTER | {"assignment", "ilp"}
STAGES = ("nodes", "devices", "joint")
Tables = NDArray[np.float64]  # between layers, then inside them, [L-1 or 2L-1, E, E]


def recheck(plan: Plan, again: Again | None) -> Iterator[Check | Told]:
    """Recheck a plan as `Strategy.recheck` says."""
    options = placement_options(plan, "exflow", ("groups", "search", "replanned"))
    search, placement = options.search, plan.placement
    assert placement is not None
    if search is None:
        raise CertificationError("options.placement: no search of exflow; re-run moeplan solve")
    if options.groups == "whole":
        check_groups(plan)
        yield Told("dead devices, pins and whole groups", checked=True)
    if "placement" not in plan.outcome:
        return
    what = ("affinity", "affinity") if search.objective == "copies" else ("hops", "hop")
    name, sense = (f"{what[0]}_kept", "max") if plan.cluster.num_nodes == 1 else (f"{what[1]}_cost", "min")
    check_goal(plan, (f"expected_{name}" if placement.has_replicas else name,), sense, KINDS)
    if again is None:
        return
    yield Check("slots repaired", plan.decisions.placement.repaired if plan.decisions.placement else 0, 0)
    copies = search.objective == "copies"  # of followers, all choices then; none where tokens return home
    followed = 1 if not copies else 0 if options.dispatch_model == "standard" else plan.model.top_k
    fitted = count_fitted(again.task, followed=followed, beside=copies)
    tables = fitted.between.astype(np.float64)
    if copies:
        tables = np.concatenate([tables, fitted.within / 2])  # both ends see a pair
    if search.cap is not None:
        held, most = highest(fitted.loads, placement), search.cap.max_load
        if held > most * (1 + TOLERANCE):
            raise CertificationError(f"a device holds {held:.6g} times a layer's mean; the cap is {most}")
        yield Told("cap on loads", checked=True)
        yield Told("that the cap is what was asked for, and what it costs", checked=False)
    if options.replanned is not None:
        yield Check("experts held", options.replanned.experts_held, placement.num_slots * placement.num_layers)
        yield Told("moves from the plan in force and the gain over it", checked=False)
    apart = None if placement.has_replicas else _apart(placement, tables, plan.cluster.devices_per_node)
    yield from _stages(plan, options, search, apart)
    outcome = plan.outcome["placement"]
    if apart is None:  # an expectation over replicas
        yield Told(f"objective ({outcome.objective.name})", checked=False)
        yield Told("bound", checked=False)
        return
    inter, intra = apart
    value = 1 - inter - intra if sense == "max" else inter * inter_ratio(plan.cluster) + intra
    yield Check("objective", outcome.objective.value, value)
    yield Told("objective", checked=True)
    if outcome.bound is not None:
        yield _bound(plan, tables, outcome, outcome.bound, search, again.folder)


def _apart(placement: Placement, tables: Tables, group: int) -> tuple[float, float]:
    """The shares of pairs that leave their node, and that leave their device but not their node."""
    device = np.array([[np.flatnonzero(row_D)[0] for row_D in placement.holds(n)] for n in range(placement.num_layers)])
    total, layers = tables.sum(), range(len(device))
    joined = [*itertools.pairwise(layers), *zip(layers, layers, strict=True)]
    kept = [
        sum(
            table[place_LE[one][:, None] == place_LE[other]].sum()
            for table, (one, other) in zip(tables, joined, strict=False)
        )
        for place_LE in (device // group, device)
    ]
    on_node, on_device = (float(one / total) if total else 1.0 for one in kept)
    return 1 - on_node, on_node - on_device


def _stages(
    plan: Plan, options: PlacementOptions, search: Search, apart: tuple[float, float] | None
) -> Iterator[Check | Told]:
    """Recheck that stages cost ever less, and that the last one is the placement."""
    if not search.stages:
        return
    ratio, names = inter_ratio(plan.cluster), [stage.name for stage in search.stages]
    costs = [ratio * stage.inter_hops + stage.intra_hops for stage in search.stages]
    falling = all(later <= sooner + TOLERANCE * ratio for sooner, later in itertools.pairwise(costs))
    moved = abs(search.stages[0].inter_hops - search.stages[:2][-1].inter_hops)  # devices are placed inside nodes
    if names != [*STAGES[: len(names)]] or moved > TOLERANCE or not falling:
        raise CertificationError(f"stages {names} that cost {costs}; expected ever less")
    if apart is None or len(names) < len(STAGES) or options.method == "ilp" or options.replanned is not None:
        yield Told("hops after each stage", checked=False)
        return
    yield Check("hops between nodes after the last stage", search.stages[-1].inter_hops, apart[0])
    yield Check("hops inside nodes after the last stage", search.stages[-1].intra_hops, apart[1])
    yield Told("last stage", checked=True)
    yield Told("hops after the stages before", checked=False)


def _bound(plan: Plan, tables: Tables, outcome: Outcome, bound: float, search: Search, folder: Path) -> Told:
    """Check the bound: none beats the pairwise one; a thorough one lies between that and what its prices prove."""
    kind = outcome.bound_kind or ""
    kinds = set(kind.split()) - {"and"}
    if not (kinds <= PAIRS or kinds <= TIGHTER):
        return Told(f"bound ({kind})", checked=False)
    assert plan.placement is not None
    widths, group, total = plan.placement.slots.tolist(), plan.cluster.devices_per_node, float(tables.sum())
    levels = {"device": widths}  # the slots of every device, and of every node where that is something else
    if 1 not in (group, plan.cluster.num_nodes):
        levels["node"] = [sum(widths[i : i + group]) for i in range(0, len(widths), group)]
    near = {
        level: kept_bound(tables, np.array(slots)).value / total if total else 1.0 for level, slots in levels.items()
    }
    pairwise, slack = _limit(plan, outcome, near), BOUND_TOLERANCE * max(abs(bound), 1)
    sign = 1 if outcome.objective.sense == "max" else -1
    if kinds <= PAIRS:
        if sign * (pairwise - bound) > slack:
            raise CertificationError(f"bound {bound:.9g} is tighter than what its kind gives, {pairwise:.9g}")
        return Told("bound", checked=True)
    if sign * (bound - pairwise) > slack:
        raise CertificationError(f"bound {bound:.9g} ({kind}) is looser than two layers at a time, {pairwise:.9g}")
    proven = proven_shares(search.proof, tables, levels, folder)
    if isinstance(proven, str):
        return Told(f"how far the {kind} bound is below that of two layers at a time ({proven})", checked=False)
    least = _limit(plan, outcome, {level: min(share, proven.get(level, share)) for level, share in near.items()})
    if sign * (least - bound) > slack:
        raise CertificationError(f"bound {bound:.9g} ({kind}) is tighter than what its prices prove, {least:.9g}")
    return Told("bound (by its prices)", checked=True)


def _limit(plan: Plan, outcome: Outcome, near: Mapping[str, float]) -> float:
    """Best objective for given shares that stay on their device and on their node."""
    if outcome.objective.sense == "max":
        return near["device"]
    ratio = inter_ratio(plan.cluster)
    return ratio - (ratio - 1) * min(near.get("node", near["device"]), 1.0) - min(near["device"], 1.0)
