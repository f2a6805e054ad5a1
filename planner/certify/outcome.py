"""The objective and the bound of a placement, computed again from the fitted tokens.

Legend: L MoE layers; E experts; D devices; N nodes; S slots; W transitions, or pairs inside layers.
"""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError
from ...runtime.plan import Plan
from ...solvers.outcome import Outcome
from .certificate import Certificate
from .fitted import Fitted
from .proof import proven_shares
from .search import Apart, check_cap, check_stages
from .structure import device_ratios, holders_of, keeps_pairs, placement_options, slot_widths, step_ratios

__all__ = ["check_outcome"]

BOUND_TOLERANCE = 1e-6  # relative; bounds are rounded up to stay bounds
MOST_EXPERTS = 64  # a transportation programme of E x E cells a layer pair takes seconds beyond
PAIRS = {"transportation", "spectral", "row"}  # of layers: what is recomputed here
TIGHTER = {"transportation", "spectral", "two-layer", "three-layer"}


def check_outcome(plan: Plan, fitted: Fitted, certificate: Certificate, folder: Path) -> None:
    """Hold objective, bound, cap and stages against the fitted counts; what cannot be recomputed is listed.

    `folder` is where the proof of a thorough bound is.
    """
    outcome, apart = plan.outcome["placement"], _apart(plan, fitted)
    found = _objectives(plan, fitted, apart)
    check_cap(plan, fitted.loads, certificate)
    check_stages(plan, apart, _inter_ratio(plan), certificate)
    if outcome.objective.name not in found:  # an expectation over replicas
        certificate.unchecked += [f"objective ({outcome.objective.name})", "bound"]
        return
    certificate.agree("objective", outcome.objective.value, found[outcome.objective.name])
    certificate.checks.append("objective")
    if outcome.bound is not None:
        _check_bound(plan, fitted, outcome, outcome.bound, certificate, folder)


def _tables(fitted: Fitted) -> NDArray[np.float64]:
    """What the placement is to keep together: between layers, then inside them, `[L-1 or 2L-1, E, E]`."""
    between = fitted.between.astype(np.float64)
    return between if fitted.within is None else np.concatenate([between, fitted.within / 2])  # both ends see a pair


def _apart(plan: Plan, fitted: Fitted) -> Apart | None:
    """The shares that leave their node, and their device alone; None with replicas, where counts do not tell."""
    assert plan.decisions.placement is not None
    rows = plan.decisions.placement.physical_to_logical
    if len(rows[0]) > plan.model.num_experts:
        return None
    holders = holders_of(rows, slot_widths(plan), plan.model.num_experts)
    device = np.array([[held[0] for held in layer] for layer in holders])
    tables, total = _tables(fitted), _tables(fitted).sum()
    layers = range(len(device))
    joined = [*itertools.pairwise(layers), *zip(layers, layers, strict=True)]
    kept = [
        sum(
            table[place_LE[one][:, None] == place_LE[other]].sum()
            for table, (one, other) in zip(tables, joined, strict=False)
        )
        for place_LE in (device // plan.cluster.devices_per_node, device)
    ]
    on_node, on_device = (float(one / total) if total else 1.0 for one in kept)
    return Apart(1 - on_node, on_node - on_device)


def _objectives(plan: Plan, fitted: Fitted, apart: Apart | None) -> Mapping[str, float]:
    """What each objective is for this placement."""
    equal = placement_options(plan).strategy == "contiguous"  # were all loads equal
    ratios = device_ratios(plan, np.ones_like(fitted.loads) if equal else fitted.loads)
    shared = {"balance": sum(ratios) / len(ratios)}
    if fitted.steps is not None:
        shared[plan.outcome["placement"].objective.name] = _step_objective(plan, fitted.steps)
    if apart is None:
        return shared
    kept, cost = 1 - apart.inter - apart.intra, apart.inter * _inter_ratio(plan) + apart.intra
    if keeps_pairs(plan):
        return shared | {"affinity_kept": kept, "affinity_cost": cost}
    return shared | {"hops_kept": kept, "hop_cost": cost}


def _step_objective(plan: Plan, steps: NDArray[np.int64]) -> float:
    """Mean over layers of the busiest device over the mean, over steps its mean or the least that a share is within."""
    quantile = placement_options(plan).quantile
    ratios_BL = step_ratios(plan, steps)
    if quantile is None:
        return float(ratios_BL.mean())
    return float(np.sort(ratios_BL, axis=0)[math.ceil(quantile * (len(steps) - 1))].mean())


def _inter_ratio(plan: Plan) -> float:
    """What a hop between nodes costs in hops inside one: the links' seconds a byte, 8 where they are unknown."""
    links = plan.cluster.links
    if not {"intra", "inter"} <= set(links):
        return 8.0
    return max(links["inter"].s_per_byte / links["intra"].s_per_byte, 1.0)


def _check_bound(
    plan: Plan, fitted: Fitted, outcome: Outcome, bound: float, certificate: Certificate, folder: Path
) -> None:
    """Refuse a bound that is tighter than two layers at a time, or its proof, give; a thorough one that is looser."""
    kind, name = outcome.bound_kind or "", outcome.objective.name
    kinds = set(kind.split()) - {"and"}
    if "balance" in name or plan.model.num_experts > MOST_EXPERTS or not (kinds <= PAIRS or kinds <= TIGHTER):
        certificate.unchecked.append(f"bound ({kind})")
        return
    tables, levels = _tables(fitted), _levels(plan)
    near = {level: _share_kept(tables, widths) for level, widths in levels.items()}
    pairwise, slack = _limit(plan, outcome, near), BOUND_TOLERANCE * max(abs(bound), 1)
    sign = 1 if outcome.objective.sense == "max" else -1
    if kinds <= PAIRS:
        if sign * (pairwise - bound) > slack:
            raise CertificationError(f"bound {bound:.9g} is tighter than what its kind gives, {pairwise:.9g}")
        certificate.checks.append("bound")
        return
    if sign * (bound - pairwise) > slack:
        raise CertificationError(f"bound {bound:.9g} ({kind}) is looser than two layers at a time, {pairwise:.9g}")
    proven = proven_shares(plan, tables, levels, folder)
    if isinstance(proven, str):
        certificate.unchecked.append(f"how far the {kind} bound is below that of two layers at a time ({proven})")
        return
    least = _limit(plan, outcome, {level: min(share, proven.get(level, share)) for level, share in near.items()})
    if sign * (least - bound) > slack:
        raise CertificationError(f"bound {bound:.9g} ({kind}) is tighter than what its prices prove, {least:.9g}")
    certificate.checks.append("bound (by its prices)")


def _levels(plan: Plan) -> dict[str, list[int]]:
    """The slots of every device, and of every node where that is something else."""
    widths, group = slot_widths(plan), plan.cluster.devices_per_node
    if 1 in (group, plan.cluster.num_nodes):
        return {"device": widths}
    return {"device": widths, "node": [sum(widths[i : i + group]) for i in range(0, len(widths), group)]}


def _limit(plan: Plan, outcome: Outcome, near: Mapping[str, float]) -> float:
    """What the objective is at best where these shares stay on their device and their node."""
    if outcome.objective.sense == "max":
        return near["device"]
    ratio = _inter_ratio(plan)
    return ratio - (ratio - 1) * min(near.get("node", near["device"]), 1.0) - min(near["device"], 1.0)


def _share_kept(tables: NDArray[np.float64], widths: list[int]) -> float:
    """The share that may stay on places of these widths."""
    total = float(tables.sum())
    return sum(_most_kept(table, widths) for table in tables if table.any()) / total if total else 1.0


def _most_kept(table_EE: NDArray[np.float64], widths: list[int]) -> float:
    """The better of the transportation bound, by linear programming, and the spectral one, for one layer pair.

    An expert meets at most the largest place's experts; all places together join sum S^2 pairs, no more and no fewer.
    """
    from scipy.optimize import linprog
    from scipy.sparse import eye_array, kron, vstack

    size, most = len(table_EE), max(widths)
    one = np.ones((1, size))
    rows, columns = kron(eye_array(size), one), kron(one, eye_array(size))
    limits, pairs = vstack([rows, columns], format="csr"), [sum(width**2 for width in widths)]
    found = linprog(
        -table_EE.ravel(),
        A_ub=limits,
        b_ub=np.full(2 * size, most),
        A_eq=np.ones((1, size * size)),
        b_eq=pairs,
        bounds=(0, 1),
        method="highs",
    )
    return min(-float(found.fun), _spectral(table_EE, widths))


def _spectral(table_EE: NDArray[np.float64], widths: list[int]) -> float:
    """W.sum()/D + C times the sum of the top D-1 singular values of the doubly centred W, for equal slots C."""
    if len(set(widths)) > 1:
        return float(table_EE.sum())
    size, places = len(table_EE), len(widths)
    project = np.eye(size) - 1 / size
    sigma = np.linalg.svd(project @ table_EE @ project, compute_uv=False)
    return float(table_EE.sum() / places + widths[0] * sigma[: places - 1].sum())
