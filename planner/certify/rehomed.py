"""Homes solved again and their exchanges counted again: the naive twin of `planner.netmoe.online` and `.tallied`.

A policy's homes are its algorithm's output: they are solved for again, by min-cost flow instead of the compiled kernel.

Legend: I samples of a part; L MoE layers; D devices; N nodes; B steps.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError
from ...runtime.plan import Plan
from ...solvers import netmoe
from .census import Census, Class
from .recount import Ledger

__all__ = ["Rehomed", "ledger_of", "locality_of", "rehomed"]

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rehomed:
    """Where samples are before each layer and after the last `[L+1, I]`; mean objective and bound of the solves."""

    device: Numbers
    objective: str
    value: float
    bound: float


def rehomed(
    plan: Plan,
    census: Census,
    klass: Class,
    where: str,
    method: str,
    per_pair: NDArray[np.float32] | None,
    *,
    oracle: bool = False,
    bounded: bool = True,
) -> Rehomed:
    """The homes of a policy under a placement; the oracle knows the next layer, without `per_pair` nobody does.

    Without `bounded` the bound is 0.
    """
    model, size = plan.model, plan.cluster.num_devices
    copies_ILD, pairs_ILE = census.sent[where].copies[klass.members], census.experts[klass.members]
    device = np.repeat(klass.home[None], model.num_layers + 1, axis=0)
    reached, bounds = np.zeros((2, klass.num_steps, model.num_layers))
    name, sizes = "", (model.hidden_size or 0) * (model.dtype_bytes or 0)

    def following(layer: int, at: Numbers) -> NDArray[np.float64] | None:
        """What these samples send at the next layer, as the contender sees it."""
        if layer + 1 == model.num_layers or (per_pair is None and not oracle):
            return None
        if per_pair is None or oracle:
            return np.asarray(copies_ILD[at, layer + 1], float)
        return np.asarray(np.maximum(pairs_ILE[at, layer].astype(float) @ per_pair[layer].astype(float), 0.0))

    for step, layer in np.ndindex(reached.shape):
        whole = np.flatnonzero(klass.step == step)
        for at in _dealt(whole, pairs_ILE[whole, layer].sum(axis=1), size) if method == "even" else [whole]:
            found = netmoe.solve(
                copies_ILD[at, layer],
                np.arange(size),
                plan.cluster,
                next_counts=following(layer, at),
                objective="bottleneck" if method == "bottleneck" else "sum",
                method="flow",
                copy_bytes=float(sizes) if sizes and method == "bottleneck" else None,
                bounded=bounded,
            )
            if np.bincount(found.device_of_sample, minlength=size).max() > -(-len(at) // size):
                raise CertificationError(f"step {step}, layer {layer}: a device takes more samples than its share")
            device[layer + 1 :, at] = found.device_of_sample
            name = found.outcome.objective.name
            reached[step, layer] += found.outcome.objective.value
            bounds[step, layer] += found.outcome.bound or 0.0
    value, bound = float(reached.mean()), float(bounds.mean())
    return Rehomed(device, name, value, value if value <= bound * (1 + 1e-9) else bound)


def ledger_of(
    plan: Plan, census: Census, klass: Class, where: str, moved: Rehomed | None, *, timed: bool
) -> tuple[Ledger, NDArray[np.float64]]:
    """What crosses in every step with these homes (None: samples stay), and the share of samples moved, `[B]`."""
    sent, group, steps = census.sent[where], plan.cluster.devices_per_node, klass.num_steps
    layers, size = plan.model.num_layers, plan.cluster.num_devices
    device = np.repeat(klass.home[None], layers + 1, axis=0) if moved is None else moved.device
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
