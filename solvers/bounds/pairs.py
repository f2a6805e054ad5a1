"""Upper bounds on the transitions that any placement keeps on a device (or node), layer pair by layer pair.

Legend: L MoE layers; E experts per layer; D devices (or nodes), S slots of each.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..arrays import Floats, Ints, flow_units

MOST_SVD = 64  # experts
CELL_S = 1e-6  # of both bounds of a layer pair, a cell


@dataclass(frozen=True, slots=True)
class KeptBound:
    """Upper bound of transitions kept by any placement, and the `kinds` of bounds that prove it."""

    value: float
    kinds: frozenset[str]

    @property
    def kind(self) -> str:
        """The kinds in words."""
        return " and ".join(sorted(self.kinds, reverse=True)) or "transportation"


def kept_bound(transitions: Iterable[Floats], slots: Ints, *, time_limit_s: float = np.inf) -> KeptBound:
    """The better of the transportation and the spectral bound for each layer pair, summed.

    Parameters
    ----------
    transitions
        W `[L-1, E, E]`, at least 0.
    slots
        S `[D]`, their sum at least E; of nodes for a bound on node hops.
    time_limit_s
        Layer pairs that this leaves no time for get the row bound, which costs next to nothing.
    """
    deadline = time.perf_counter() + time_limit_s
    total, kinds = 0.0, frozenset[str]()
    for weight_EE in transitions:
        left_s = deadline - time.perf_counter()
        bounds = {"row": row_bound} if left_s <= len(weight_EE) ** 2 * CELL_S else _BOUNDS
        found = {kind: bound(weight_EE, slots) for kind, bound in bounds.items()}
        kind = min(found, key=found.__getitem__)
        total += found[kind]
        kinds |= {kind}
    return KeptBound(total, kinds)


def transportation_bound(weight: Floats, slots: Ints) -> float:
    """The most weight that experts can keep when each meets no more experts of the other layer than fit beside it.

    Parameters
    ----------
    weight
        W `[E, E]` of one layer pair.
    slots
        S `[D]`.

    Notes
    -----
    Let y[a, b] say that the transition a -> b may stay somewhere, and R = sum(S) - E the number of replicas:

        max sum W[a,b] y[a,b]                              y in [0, 1]
        s.t. (1) sum_b y[a,b] <= max(S) + extra[a],   (2) sum_a extra[a]  <= R max(S)
             (3) sum_a y[a,b] <= max(S) + extra'[b],  (4) sum_b extra'[b] <= R max(S)
             (5) sum_{a,b} y[a,b] = sum_d S[d]^2      (<= where R > 0)

    (1, 3): an expert meets at most S[d] experts on each device d that holds it; (2, 4): the replicas share R further
    devices; (5): device d joins S[d] x S[d] pairs, all different without replicas. Each holds for every placement and
    whichever of its replicas a token uses, so the optimum bounds them all. With equal slots C and no replicas, every
    expert meets exactly C.
    """
    from ortools.graph.python.min_cost_flow import SimpleMinCostFlow

    num_experts, most = len(weight), int(slots.max())
    units_EE, scale = flow_units(weight)
    a_E, b_E = np.arange(num_experts), num_experts + np.arange(num_experts)
    source, extra_out, extra_in, sink = range(2 * num_experts, 2 * num_experts + 4)
    spare = max(0, int(slots.sum()) - num_experts) * most
    pairs = int(min((slots**2).sum(), num_experts**2))
    skipped = pairs if spare else 0
    one_E = np.ones(num_experts, np.int64)
    start = np.concatenate([source * one_E, extra_out * one_E, b_E, b_E, [source, extra_in, source]])
    end = np.concatenate([a_E, a_E, sink * one_E, extra_in * one_E, [extra_out, sink, sink]])
    extra_E, limits = spare * one_E, [spare, spare, skipped]
    limit = np.concatenate([most * one_E, extra_E, most * one_E, extra_E, limits])  # (1), (2), (3), (4)
    graph = SimpleMinCostFlow()
    graph.add_arcs_with_capacity_and_unit_cost(
        np.repeat(a_E, num_experts), np.tile(b_E, num_experts), np.ones(units_EE.size, np.int64), -units_EE.ravel()
    )
    graph.add_arcs_with_capacity_and_unit_cost(start, end, limit, np.zeros(len(start), np.int64))
    graph.set_nodes_supplies(np.array([source, sink]), np.array([pairs, -pairs]))  # (5)
    status = graph.solve()
    assert status == graph.OPTIMAL, status
    return float(-graph.optimal_cost() / scale)


def spectral_bound(weight: Floats, slots: Ints) -> float:
    """The projected spectral bound on the weight kept; the whole weight where there are replicas.

    Notes
    -----
    With the 0/1 matrices X, Y `[E, D]` of the two layers, kept = tr(X' W Y). Split along the constant vector, Q the
    projection away from it, s = S:

        tr(X' W Y) <= W.sum() |s|^2 / E^2 + (|Q W 1| + |Q W' 1|) g / E + sum_i sigma_i(Q W Q) lambda_i
        g^2 = sum_d S[d]^3 - (sum_d S[d]^2)^2 / E,    lambda = eigenvalues of diag(s) - s s' / E, both descending

    The first term is exact, the second Cauchy-Schwarz (|Q Y s| = g), the third von Neumann: X'QX = diag(s) - ss'/E.
    For equal slots C it is W.sum() / D + C * (sum of the top D-1 singular values).
    """
    num_experts = len(weight)
    if slots.sum() != num_experts:
        return float(weight.sum())
    slots_D = slots.astype(np.float64)
    squares = float((slots_D**2).sum())
    skew = np.sqrt(max(0.0, float((slots_D**3).sum()) - squares**2 / num_experts))
    centred_EE = weight - weight.mean(axis=0) - weight.mean(axis=1, keepdims=True) + weight.mean()
    sigma_E = _singular_values(centred_EE)
    lambda_D = np.linalg.eigvalsh(np.diag(slots_D) - np.outer(slots_D, slots_D) / num_experts)[::-1]
    rank = min(num_experts, len(slots_D))
    sums_a, sums_b = weight.sum(axis=1), weight.sum(axis=0)
    sideways = np.linalg.norm(sums_a - sums_a.mean()) + np.linalg.norm(sums_b - sums_b.mean())
    inside = float(sigma_E[:rank] @ np.maximum(lambda_D[:rank], 0.0))
    bound = weight.sum() * squares / num_experts**2 + sideways * skew / num_experts + inside
    return float(min(bound * (1 + 1e-12), weight.sum()))


def _singular_values(matrix: Floats) -> Floats:
    """The singular values, descending; of large matrices from A A', which is fast on busy machines too, and from above.

    Notes
    -----
    An eigenvalue of A A' is found to E eps times the largest one.
    """
    if len(matrix) <= MOST_SVD:
        return np.asarray(np.linalg.svd(matrix, compute_uv=False), dtype=np.float64)
    square_E = np.linalg.eigvalsh(matrix @ matrix.T)[::-1]
    error = len(matrix) * np.finfo(np.float64).eps * square_E[0]
    return np.asarray(np.sqrt(np.maximum(square_E, 0.0) + error))


def row_bound(weight: Floats, slots: Ints) -> float:
    """The heaviest max(S) transitions from each expert, or to each, whichever is less; with replicas the whole weight.

    Notes
    -----
    The transportation bound with nothing but its (1), or its (3).
    """
    num_experts, most = len(weight), int(slots.max())
    if slots.sum() != num_experts:
        return float(weight.sum())
    heaviest = [np.partition(w, num_experts - most, axis=1)[:, num_experts - most :].sum() for w in (weight, weight.T)]
    return float(min(heaviest) * (1 + 1e-12))


_BOUNDS = {"transportation": transportation_bound, "spectral": spectral_bound}
