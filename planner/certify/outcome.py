"""The objective and the bound of a placement, computed again from the fitted tokens.

Legend: L MoE layers; E experts; D devices; N nodes; S slots; W transitions.
"""

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError
from ...runtime.plan import Plan
from ...solvers.outcome import Outcome
from .certificate import Certificate
from .evaluation import Fitted
from .structure import holders_of, placement_options, slot_widths

__all__ = ["check_outcome"]

BOUND_TOLERANCE = 1e-6  # relative; bounds are rounded up to stay bounds
MOST_EXPERTS = 64  # a transportation programme of E x E cells a layer pair takes seconds beyond


def check_outcome(plan: Plan, fitted: Fitted, certificate: Certificate) -> None:
    """Hold objective and bound against the fitted counts; what cannot be recomputed here is listed as unchecked."""
    outcome = plan.outcome["placement"]
    found = _objectives(plan, fitted)
    if outcome.objective.name not in found:  # an expectation over replicas
        certificate.unchecked += [f"objective ({outcome.objective.name})", "bound"]
        return
    certificate.agree("objective", outcome.objective.value, found[outcome.objective.name])
    certificate.checks.append("objective")
    if outcome.bound is not None:
        _check_bound(plan, fitted, outcome, outcome.bound, certificate)


def _objectives(plan: Plan, fitted: Fitted) -> dict[str, float]:
    """What each objective is for this placement; hops only without replicas, where they follow from the counts."""
    assert plan.decisions.placement is not None
    rows = plan.decisions.placement.physical_to_logical
    holders = holders_of(rows, slot_widths(plan), plan.model.num_experts)
    shared = {"balance": _balance(plan, holders, fitted.loads)}
    total = fitted.transitions.sum()
    if len(rows[0]) > plan.model.num_experts:
        return shared
    device = np.array([[held[0] for held in layer] for layer in holders])
    kept = _same(device, fitted.transitions) / total if total else 1.0
    on_node = _same(device // plan.cluster.devices_per_node, fitted.transitions) / total if total else 1.0
    return shared | {"hops_kept": kept, "hop_cost": (1 - on_node) * _inter_ratio(plan) + on_node - kept}


def _same(place_LE: NDArray[np.int64], transitions: NDArray[np.int64]) -> float:
    """Transitions between experts of one place."""
    return float(
        sum(
            table[place_LE[layer][:, None] == place_LE[layer + 1][None, :]].sum()
            for layer, table in enumerate(transitions)
        )
    )


def _balance(plan: Plan, holders: list[list[list[int]]], loads: NDArray[np.int64]) -> float:
    """Busiest over mean device with even replicas, mean over layers (contiguous: were all loads equal)."""
    ratios = []
    widths = slot_widths(plan)
    equal = placement_options(plan).strategy == "contiguous"
    for layer, held in enumerate(holders):
        device_load = [0.0] * len(widths)
        for expert, devices in enumerate(held):
            for device in devices:
                device_load[device] += (1.0 if equal else float(loads[layer, expert])) / len(devices)
        used = [load for load, width in zip(device_load, widths, strict=True) if width]
        ratios.append(max(used) * len(used) / sum(used) if sum(used) else 1.0)
    return sum(ratios) / len(ratios)


def _inter_ratio(plan: Plan) -> float:
    """What a hop between nodes costs in hops inside one: the links' seconds a byte, 8 where they are unknown."""
    links = plan.cluster.links
    if not {"intra", "inter"} <= set(links):
        return 8.0
    return max(links["inter"].s_per_byte / links["intra"].s_per_byte, 1.0)


def _check_bound(plan: Plan, fitted: Fitted, outcome: Outcome, bound: float, certificate: Certificate) -> None:
    """Refuse a bound that is tighter than the two-layer bounds of the fitted transitions."""
    kind = outcome.bound_kind or ""
    hops = outcome.objective.name in ("hops_kept", "hop_cost")
    if (
        not hops
        or plan.model.num_experts > MOST_EXPERTS
        or not set(kind.split()) <= {"transportation", "and", "spectral", "row"}
    ):
        certificate.unchecked.append(f"bound ({kind})")
        return
    total = float(fitted.transitions.sum())
    kept = sum(_most_kept(table, slot_widths(plan)) for table in fitted.transitions) / total if total else 1.0
    if outcome.objective.name == "hops_kept":
        tightest, excess = kept, kept - bound
    else:
        group = plan.cluster.devices_per_node
        widths = [sum(slot_widths(plan)[i : i + group]) for i in range(0, plan.cluster.num_devices, group)]
        on_node = sum(_most_kept(table, widths) for table in fitted.transitions) / total if total else 1.0
        ratio = _inter_ratio(plan)
        tightest = ratio - (ratio - 1) * min(on_node, 1.0) - min(kept, 1.0)
        excess = bound - tightest
    if excess > BOUND_TOLERANCE * max(abs(bound), 1):
        raise CertificationError(f"bound {bound:.9g} is tighter than what its kind gives, {tightest:.9g}")
    certificate.checks.append("bound")


def _most_kept(table_EE: NDArray[np.int64], widths: list[int]) -> float:
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
        -table_EE.ravel().astype(float),
        A_ub=limits,
        b_ub=np.full(2 * size, most),
        A_eq=np.ones((1, size * size)),
        b_eq=pairs,
        bounds=(0, 1),
        method="highs",
    )
    return min(-float(found.fun), _spectral(table_EE.astype(float), widths))


def _spectral(table_EE: NDArray[np.float64], widths: list[int]) -> float:
    """W.sum()/D + C times the sum of the top D-1 singular values of the doubly centred W, for equal slots C."""
    if len(set(widths)) > 1:
        return float(table_EE.sum())
    size, places = len(table_EE), len(widths)
    project = np.eye(size) - 1 / size
    sigma = np.linalg.svd(project @ table_EE @ project, compute_uv=False)
    return float(table_EE.sum() / places + widths[0] * sigma[: places - 1].sum())
