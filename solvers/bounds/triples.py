"""The Lagrangian relaxation of a placement into triples of layers.

Legend: L MoE layers; E experts per layer; J experts beside a layer, E a side; C experts per device, D = E / C devices.

A middle layer m and the layers beside it make a triple, and a column is what one device holds of them: groups S, T, U
of C experts of the layers m-1, m, m+1. With W the transitions, shared out between the two triples that count a pair,
A + B' = W[m-1] and B + A' = W[m], a placement keeps

    max sum_m sum_d A_m(S_d, T_d) + B_m(T_d, U_d)
    s.t. (1) every expert of a layer is in one group of each triple that has this layer    (prices before, own, after)
         (2) triples that share a pair of layers join the same experts of it               (price: how W is shared out)

Both are priced. What is left falls apart by triple, and by the experts t of the middle layer, as a group T belongs to
its C experts in equal parts:

    bound = sum_m [ sum of prices + 1/C sum_t max over T that hold t of r(T) ],                                      (3)
    r(T) = max_S A(S, T) - before(S) + max_U B(T, U) - after(U) - own(T)

S and U are the C best for T each by itself, so that only T is searched for (`groups`). Any prices give a bound. Over
all prices its least is that of column generation for all triples at once, with (2) as rows of the master.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from ..arrays import Floats

ROUNDING = 1e-11


@dataclass(frozen=True, slots=True)
class Prices:
    """A point of the dual, or a direction in it."""

    share: Floats  #: What the triple of the earlier layer counts of W `[L-1, E, E]`; the later layer's counts the rest
    #: own, before, after: prices of experts in the triple of middle layer m `[L, E]`: of layer m, of m - 1, of m + 1
    own: Floats
    before: Floats
    after: Floats

    def dot(self, other: "Prices") -> float:
        """The inner product."""
        return sum(float(np.vdot(a, b)) for a, b in zip(self._arrays(), other._arrays(), strict=True))

    def magnitude(self) -> float:
        """The sum of absolute values."""
        return sum(float(np.abs(a).sum()) for a in self._arrays())

    def moved(self, direction: "Prices", step: float) -> "Prices":
        """Step from these prices: minus `step` times a direction."""
        return Prices(*(a - step * b for a, b in zip(self._arrays(), direction._arrays(), strict=True)))

    def with_floor(self, floor_L: Floats) -> Floats:
        """Prices by layer and expert `[L, E, E+4]`: shares to experts of the next layer, own, before, after, floor."""
        share_LEE = np.concatenate([self.share, np.zeros((1, *self.share.shape[1:]))])
        floor_LE = np.broadcast_to(floor_L[:, None], self.own.shape)
        return np.concatenate([share_LEE, np.stack([self.own, self.before, self.after, floor_LE], axis=2)], axis=2)

    def _arrays(self) -> Iterator[Floats]:
        return (getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The value of (3) at some prices and a subgradient there; a bound only if groups were searched for."""

    value: float
    gradient: Prices
    #: By middle layer `[L]`, what the best group of some expert is worth, and what a search cut short may have missed:
    #: whoever has the groups of more worth has the bound
    floor: Floats
    searched: bool  #: Whether every search came to its end
    nodes: int  #: The work of the searches


class _Best(NamedTuple):
    """Best groups of one triple: their value in (3), the pairs met there `[E, J]`, and the rest as in `Evaluation`."""

    value: float
    met: Floats
    floor: float
    searched: bool
    nodes: int


class Triples:
    """The relaxation of `weights` W `[L-1, E, E]`, L > 1, with `size` C experts per device.

    There are `count` triples. Holds the best groups found for each middle expert: the next evaluation starts there.
    """

    def __init__(self, weights: Floats, size: int, executor: Executor) -> None:
        self._weights, self._size, self._executor = weights, size, executor
        self._stop = np.zeros(1, np.bool_)
        num_layers, num_experts = len(weights) + 1, weights.shape[1]
        self._middles = range(1, max(2, num_layers - 1))
        self.count = len(self._middles)
        first_EC = (np.arange(num_experts)[:, None] + np.arange(size)) % num_experts
        self._group_LEC = np.tile(first_EC, (num_layers, 1, 1))

    def compile(self) -> float:
        """The seconds to compile, or to load what was compiled, in this thread, where Ctrl-C ends it."""
        started = time.perf_counter()
        self._triple(self._middles[0], self.first_prices(), 1)
        return time.perf_counter() - started

    def stop(self) -> None:
        """End the searches that run, and all to come, at once; their bounds are loose."""
        self._stop[0] = True

    def first_prices(self) -> Prices:
        """Prices of zero; W is halved, but for the pairs that one triple alone counts."""
        none_LE = np.zeros((len(self._weights) + 1, self._weights.shape[1]))
        share = self._weights / 2
        share[0] = 0.0
        if len(share) > 1:
            share[-1] = self._weights[-1]
        return Prices(share, none_LE, none_LE, none_LE)

    def evaluate(self, prices: Prices, most_nodes: int) -> Evaluation:
        """(3) at these prices: exact, or an upper bound if the nodes do not suffice; with 0 nodes a mere estimate."""
        gradient = Prices(np.zeros_like(prices.share), *np.zeros((3, *prices.own.shape)))
        value, floor_L, searched, nodes = 0.0, np.zeros(len(prices.own)), True, 0
        triples = self._executor.map(lambda middle: self._triple(middle, prices, most_nodes), self._middles)
        for middle, best in zip(self._middles, triples, strict=True):
            self._enter(gradient, middle, best.met)
            value += best.value
            floor_L[middle] = best.floor
            searched &= best.searched
            nodes += best.nodes
        gradient.share[0] = gradient.share[-1] = 0.0
        scale = float(self._weights.sum()) + prices.magnitude()
        return Evaluation(value + ROUNDING * scale, gradient, floor_L, searched, nodes)

    def _triple(self, middle: int, prices: Prices, most_nodes: int) -> _Best:
        from .groups import climb, met, search

        worth_EJ, sides = self._worth(middle, prices)
        group_EC = self._group_LEC[middle]
        value_E = climb(worth_EJ, sides, group_EC)
        missed, nodes = -np.inf, 0
        if most_nodes:
            missed, nodes = search(worth_EJ, sides, group_EC, value_E, most_nodes, self._stop)
        price = prices.own[middle].sum() + prices.before[middle].sum()
        if sides > 1:
            price += prices.after[middle].sum()
        value, least = price + np.maximum(value_E, missed).sum() / self._size, float(value_E.min())
        met_EJ = met(worth_EJ, sides, group_EC)
        return _Best(float(value), met_EJ, max(missed, least), missed <= least, nodes)

    def _worth(self, middle: int, prices: Prices) -> tuple[Floats, int]:
        """Worth of each pair of a middle expert and one beside it `[E, J]`, prices within, and the number of sides."""
        sides_EE = [(self._weights[middle - 1] - prices.share[middle - 1]).T - prices.before[middle] / self._size]
        if middle < len(self._weights):
            sides_EE.append(prices.share[middle] - prices.after[middle] / self._size)
        own_E = prices.own[middle] / (len(sides_EE) * self._size)
        return np.concatenate(sides_EE, axis=1) - own_E[:, None], len(sides_EE)

    def _enter(self, gradient: Prices, middle: int, met_EJ: Floats) -> None:
        """The part of the subgradient that the best groups of a triple give: how they miss (1) and (2)."""
        met_sEE = met_EJ.reshape(len(met_EJ), -1, len(met_EJ)).swapaxes(0, 1) / self._size
        gradient.own[middle] = 1 - met_sEE[0].sum(axis=1) / self._size
        gradient.before[middle] = 1 - met_sEE[0].sum(axis=0) / self._size
        gradient.share[middle - 1] -= met_sEE[0].T
        if len(met_sEE) > 1:
            gradient.after[middle] = 1 - met_sEE[1].sum(axis=0) / self._size
            gradient.share[middle] += met_sEE[1]
