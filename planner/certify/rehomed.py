"""Homes solved for again and their exchanges counted again: the naive twin of `planner.netmoe.online` and `.tallied`.

A policy's homes are its algorithm's output: they are solved for again by `solvers.netmoe`, by min-cost flow instead of
the compiled kernel. Nothing that it tells of them is used.

Legend: I samples of a part; L MoE layers; E experts; D devices; N nodes; B steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError
from ...runtime.plan import Plan
from ...solvers import netmoe
from .census import Census, Class
from .home_cost import HomeCost
from .recount import Ledger

__all__ = ["Reached", "Seen", "dealt_homes", "ledger_of", "locality_of", "reached", "rehomed"]

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a policy sees of a part under a placement: copies to devices `[I, L, D]`, pairs with experts `[I, L, E]`.

    The oracle knows the next layer; without `per_pair` nobody else does.
    """

    klass: Class
    copies: Numbers
    pairs: Numbers
    per_pair: NDArray[np.float32] | None
    oracle: bool

    @classmethod
    def of(
        cls, census: Census, klass: Class, where: str, per_pair: NDArray[np.float32] | None, *, oracle: bool = False
    ) -> "Seen":
        """What is seen by a contender."""
        return cls(klass, census.sent[where].copies[klass.members], census.experts[klass.members], per_pair, oracle)

    def solves(self) -> Iterator[tuple[int, Numbers]]:
        """Layer and samples, layer by layer of each step."""
        for step, layer in np.ndindex(self.klass.num_steps, self.copies.shape[1]):
            yield layer, np.flatnonzero(self.klass.step == step)

    def exchanges(self, layer: int, at: Numbers) -> list[NDArray[np.float64]]:
        """The copies of some samples in this layer's combine and, as seen, in the next layer's dispatch, `[I, D]`."""
        combine = self.copies[at, layer].astype(float)
        if layer + 1 == self.copies.shape[1] or (self.per_pair is None and not self.oracle):
            return [combine]
        if self.per_pair is None or self.oracle:
            return [combine, self.copies[at, layer + 1].astype(float)]
        fixed = np.rint(np.clip(self.per_pair[layer].astype(float), -1024, 1024) * 2**20).astype(int)
        return [combine, np.maximum(self.pairs[at, layer] @ fixed, 0) / 2**20]


@dataclass(frozen=True, slots=True)
class Reached:
    """The objective of homes and its bound, means over the solves."""

    name: str
    value: float
    bound: float


def rehomed(plan: Plan, seen: Seen, method: str) -> Numbers:
    """Where a method's samples are before each layer and after the last, `[L+1, I]`."""
    size = plan.cluster.num_devices
    device = np.repeat(seen.klass.home[None], plan.model.num_layers + 1, axis=0)
    for layer, whole in seen.solves():
        length = seen.pairs[whole, layer].sum(axis=1)
        for at in _dealt(whole, length, size) if method == "even" else [whole]:
            combine, *following = seen.exchanges(layer, at)
            found = netmoe.solve(
                combine,
                np.arange(size),
                plan.cluster,
                next_counts=following[0] if following else None,
                objective="bottleneck" if method == "bottleneck" else "sum",
                method="flow",
                copy_bytes=plan.model.copy_bytes,
                bounded=False,
            ).device_of_sample
            if np.bincount(found, minlength=size).max() > -(-len(at) // size):
                raise CertificationError(f"layer {layer}: a device takes more samples of a step than its share")
            device[layer + 1 :, at] = found
    return device


def dealt_homes(plan: Plan, census: Census, klass: Class) -> Numbers:
    """Where samples are that were dealt by length alone, `[L+1, I]`: longest first, to whoever has fewest tokens."""
    home, size = klass.home.copy(), plan.cluster.num_devices
    for step in range(klass.num_steps):
        at = np.flatnonzero(klass.step == step)
        length = census.tokens[klass.members[at]].tolist()
        held: list[list[int]] = [[] for _ in range(size)]
        for one in sorted(range(len(at)), key=lambda one: (-length[one], one)):
            free = [device for device in range(size) if len(held[device]) < -(-len(at) // size)]
            device = min(free, key=lambda device: (sum(held[device]), device))
            held[device].append(length[one])
            home[at[one]] = device
    return np.repeat(home[None], plan.model.num_layers + 1, axis=0)


def reached(plan: Plan, seen: Seen, method: str, device: Numbers) -> Reached:
    """What these homes reach, and what no homes of whole steps could."""
    cost, size = HomeCost.of(plan, method), plan.cluster.num_devices
    found = []
    for layer, at in seen.solves():
        exchanges = seen.exchanges(layer, at)
        found.append((cost.value(exchanges, device[layer + 1, at]), cost.bound(exchanges, -(-len(at) // size))))
    value, bound = np.mean(found, axis=0).tolist()
    return Reached(cost.name, value, value if value <= bound * (1 + 1e-9) else bound)


def ledger_of(
    plan: Plan, census: Census, klass: Class, where: str, moved: Numbers | None, *, timed: bool
) -> tuple[Ledger, NDArray[np.float64]]:
    """What crosses in every step with these homes (None: samples stay), and the share of samples moved, `[B]`."""
    sent, group, steps = census.sent[where], plan.cluster.devices_per_node, klass.num_steps
    layers, size = plan.model.num_layers, plan.cluster.num_devices
    device = np.repeat(klass.home[None], layers + 1, axis=0) if moved is None else moved
    ledger, moves_B = Ledger.empty(steps, (steps, layers, size), timed=timed), np.zeros(steps)
    far_DD = np.arange(size)[:, None] // group != np.arange(size) // group
    for step in range(steps):
        at = np.flatnonzero(klass.step == step)
        who = klass.members[at]
        ledger.sums["tokens"][step] = census.tokens[who].sum()
        moves_B[step] = (device[1:, at] != device[:-1, at]).mean()
        for layer in range(layers):
            ledger.loads[step, layer] = sent.pairs[who, layer].sum(axis=0)
            here = device[layer, at][None] == np.arange(size)[:, None]
            if ledger.moves:
                ledger.moves.sitting[:, step, layer] = here @ census.tokens[who], here @ census.contexts[who]
            for phase, end in enumerate((device[layer, at], device[layer + 1, at])):
                between_DD = (end[None] == np.arange(size)[:, None]).astype(np.int64) @ sent.copies[who, layer]
                np.fill_diagonal(between_DD, 0)
                ledger.sums["device_copies"][step] += between_DD.sum()
                ledger.sums["far_copies"][step] += between_DD[far_DD].sum()
                elsewhere = np.arange(plan.cluster.num_nodes) != (end // group)[:, None]
                ledger.sums["node_copies"][step] += sent.nodes[who, layer][elsewhere].sum()
                if ledger.moves:
                    for far, mask_DD in enumerate((~far_DD, far_DD)):
                        ends = (between_DD * mask_DD).sum(axis=1), (between_DD * mask_DD).sum(axis=0)
                        ledger.moves.ports[phase, step, layer, far] = ends if phase == 0 else ends[::-1]
    ledger.step_tokens = int(ledger.sums["tokens"].sum())
    return ledger, moves_B


def locality_of(plan: Plan, census: Census) -> tuple[float, float]:
    """Blind and least copies a fitted step between nodes (on one node: devices), next layers known."""
    klass, sent, size = census.classed(plan, fit=True), census.sent["plan"], plan.cluster.num_devices
    several = plan.cluster.num_nodes > 1
    near_ILM = (sent.copies if not several else _by_node(sent.copies, plan)).astype(float)
    blind = least = 0.0
    for step in range(klass.num_steps):
        who = klass.members[klass.step == step]
        room = -(-len(who) // size) * (plan.cluster.devices_per_node if several else 1)
        for layer in range(plan.model.num_layers):
            near = near_ILM[who, layer] + (near_ILM[who, layer + 1] if layer + 1 < near_ILM.shape[1] else 0.0)
            cost = near.sum(axis=1)[:, None] - near
            blind += float(cost.mean(axis=1).sum())
            price = cost.mean(axis=0).max() - cost.mean(axis=0)
            lower = [(cost + p).min(axis=1).sum() - room * p.sum() for p in (0 * price, price)]
            least += max(float(max(lower)), 0.0)
    return blind / klass.num_steps, least / klass.num_steps


def _dealt(whole: Numbers, length: Numbers, size: int) -> list[Numbers]:
    """Rounds of one sample a device, the longest first, those of one length as they come."""
    order = sorted(range(len(whole)), key=lambda one: (-length[one], one))
    return [whole[order[first : first + size]] for first in range(0, len(order), size)]


def _by_node(copies_ILD: Numbers, plan: Plan) -> Numbers:
    group = plan.cluster.devices_per_node
    return np.stack([copies_ILD[:, :, d : d + group].sum(axis=2) for d in range(0, copies_ILD.shape[2], group)], axis=2)
