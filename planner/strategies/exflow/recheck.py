"""Recheck of an exflow plan: the affinity its placement keeps, its cap, its stages and its bound.

Legend: L MoE layers; E experts. Tables count pairs of experts between layers, then inside them: `[L-1 or 2L-1, E, E]`.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ....errors import CertificationError
from ....runtime.plan import Plan
from ....solvers.arrays import Floats
from ....solvers.bounds.pairs import kept_bound
from ....solvers.cost import inter_ratio
from ....solvers.outcome import Outcome
from ....solvers.placement import Placement
from ...certify.bounds import proven_shares
from ...certify.certificate import TOLERANCE, Certificate
from ...certify.recounted import count_fitted
from ..placement import check_goal, check_groups, highest, stated_placement
from ..placement_options import PlacementOptions
from ..strategy import Recheck
from .options import Search

BOUND_TOLERANCE = 1e-6  # relative; bounds are rounded up to stay bounds
PAIRS = {"transportation", "spectral", "row"}  # of layers: what is proved again here
TIGHTER = {"transportation", "spectral", "two-layer", "three-layer"}
KINDS = PAIRS | TIGHTER | {"assignment", "ilp"}
STAGES = ("nodes", "devices", "joint")


def recheck(plan: Plan, again: Recheck | None, certificate: Certificate) -> None:
    """Recheck a plan as `Strategy.recheck` says."""
    placement, options = stated_placement(plan, "exflow", ("groups", "search", "replanned"))
    if (search := options.search) is None:
        raise CertificationError("options.placement: no search of exflow; re-run moeplan solve")
    if options.groups == "whole":
        check_groups(plan)
        certificate.checked("dead devices, pins and whole groups")
    if "placement" not in plan.outcome:
        return
    what = ("affinity", "affinity") if search.objective == "copies" else ("hops", "hop")
    name, sense = (f"{what[0]}_kept", "max") if plan.cluster.num_nodes == 1 else (f"{what[1]}_cost", "min")
    check_goal(plan, (f"expected_{name}" if placement.has_replicas else name,), sense, KINDS)
    if again is None:
        return
    certificate.agree("slots repaired", plan.decisions.placement.repaired if plan.decisions.placement else 0, 0)
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
        certificate.checked("cap on loads")
        certificate.unchecked.append("that the cap is what was asked for, and what it costs")
    if options.replanned is not None:
        certificate.agree("experts held", options.replanned.experts_held, placement.num_slots * placement.num_layers)
        certificate.unchecked.append("moves from the plan in force and the gain over it")
    apart = None if placement.has_replicas else _apart(placement, tables, plan.cluster.devices_per_node)
    _check_stages(plan, options, search, apart, certificate)
    outcome = plan.outcome["placement"]
    if apart is None:  # an expectation over replicas
        certificate.unchecked.append(f"objective ({outcome.objective.name})")
        certificate.unchecked.append("bound")
        return
    inter, intra = apart
    value = 1 - inter - intra if sense == "max" else inter * inter_ratio(plan.cluster) + intra
    certificate.agree("objective", outcome.objective.value, value)
    certificate.checked("objective")
    _check_bound(plan, tables, search, again.folder, certificate)


def _apart(placement: Placement, tables: Floats, group: int) -> tuple[float, float]:
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


def _check_stages(
    plan: Plan, options: PlacementOptions, search: Search, apart: tuple[float, float] | None, certificate: Certificate
) -> None:
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
        certificate.unchecked.append("hops after each stage")
        return
    certificate.agree("hops between nodes after the last stage", search.stages[-1].inter_hops, apart[0])
    certificate.agree("hops inside nodes after the last stage", search.stages[-1].intra_hops, apart[1])
    certificate.checked("last stage")
    certificate.unchecked.append("hops after the stages before")


def _check_bound(plan: Plan, tables: Floats, search: Search, folder: Path, certificate: Certificate) -> None:
    """Check the bound: none beats the pairwise one; a thorough one lies between that and what its prices prove."""
    outcome = plan.outcome["placement"]
    if (bound := outcome.bound) is None:
        return
    kind = outcome.bound_kind or ""
    kinds = set(kind.split()) - {"and"}
    if not (kinds <= PAIRS or kinds <= TIGHTER):
        certificate.unchecked.append(f"bound ({kind})")
        return
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
        certificate.checked("bound")
        return
    if sign * (bound - pairwise) > slack:
        raise CertificationError(f"bound {bound:.9g} ({kind}) is looser than two layers at a time, {pairwise:.9g}")
    proven = proven_shares(search.proof, tables, levels, folder)
    if isinstance(proven, str):
        certificate.unchecked.append(f"how far the {kind} bound is below that of two layers at a time ({proven})")
        return
    least = _limit(plan, outcome, {level: min(share, proven.get(level, share)) for level, share in near.items()})
    if sign * (least - bound) > slack:
        raise CertificationError(f"bound {bound:.9g} ({kind}) is tighter than what its prices prove, {least:.9g}")
    certificate.checked("bound (by its prices)")


def _limit(plan: Plan, outcome: Outcome, near: Mapping[str, float]) -> float:
    """Best objective for given shares that stay on their device and on their node."""
    if outcome.objective.sense == "max":
        return near["device"]
    ratio = inter_ratio(plan.cluster)
    return ratio - (ratio - 1) * min(near.get("node", near["device"]), 1.0) - min(near["device"], 1.0)
