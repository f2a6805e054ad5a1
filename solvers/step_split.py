"""Replicas chosen by the counts of a step, for tokens that are at home before every layer.

`quota` and `lp` split the token-expert pairs of a layer and step so that the busiest device holds as little as can be,
as `quota.least` says. `quota` then keeps as many as can be on their own device, else on their own node: every rank
knows what every source sends. `lp` does not go by sources: its ranks know the sums alone, and a token takes a replica
in proportion to what each is to serve. SGLang's LP dispatch draws them, so that its loads are these up to chance; here
tokens take turns. In loads the two rules are alike, in copies they are not.

To be imported in the call that needs it, as `quota` is.

Legend: B steps; M rows, parts of steps; L MoE layers; E experts; P slots; D devices; T tokens; K experts per token;
Q queues of an expert's tokens: one a source, or one in all; R periods, in each of which the placement is one.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .arrays import Floats, Ints, flow_units
from .compiled import compiled
from .placement import DEALS, Placement
from .quota import Holders, furthest_behind, holders_of, least
from .step_deals import deal_of, served


class StepSplit:
    """The split of every step and layer, dealt out token by token.

    Parameters
    ----------
    holders
        Who holds what in each period and layer, `[R][L]`, on nodes of devices; by `lp` on one node.
    rule
        `quota`, `lp`, `even` or `capacity`.
    pairs
        Token-expert pairs of every step, `[B, L, E, D]`, by the device that their token is on.
    ratio
        Cost of a pair that crosses nodes over that of one that crosses devices.
    period
        Of each step, `[B]`; None: there is one.
    """

    def __init__(
        self,
        holders: Sequence[Sequence[Holders]],
        rule: str,
        pairs: NDArray[np.int32],
        ratio: int,
        period: Ints | None = None,
    ) -> None:
        num_steps, num_layers, num_experts, num_devices = pairs.shape
        self.by_source = rule != "lp"
        self._period = np.zeros(num_steps, np.int64) if period is None else period
        num_slots = max(len(of.device) for layers in holders for of in layers)
        self._first = np.zeros((num_layers, len(holders), num_experts + 1), np.int64)
        self._device = np.zeros((num_layers, len(holders), num_slots), np.int64)
        for number, layers in enumerate(holders):
            for layer, of in enumerate(layers):
                self._first[layer, number], self._device[layer, number, : len(of.device)] = of.first, of.device
        shape = (num_steps, num_layers, num_slots, num_devices if self.by_source else 1)
        self._dealt, self._given = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        deal = deal_of(DEALS.index(rule), ratio)
        for step, layer in np.ndindex(num_steps, num_layers):
            of, of_layer = holders[int(self._period[step])][layer], pairs[step, layer].astype(np.int64)
            if self.by_source:
                self._dealt[step, layer, : len(of.device)] = deal(of_layer, of)
            else:
                self._dealt[step, layer, : len(of.device), 0] = served(of_layer.sum(axis=1), of)

    def choose(
        self, layer: int, ids: NDArray[np.integer], home: NDArray[np.integer], step: NDArray[np.integer]
    ) -> NDArray[np.int32]:
        """The device of every routed cell, int32 `[T, K]`, -1 where `ids` names no expert; the next tokens of a step.

        Those of an expert and queue take turns as `quota.in_turn` says, so that any part of a step is split alike.
        """
        queue = np.asarray(home if self.by_source else np.zeros_like(home), np.int64)
        device = np.full(ids.shape, -1, np.int32)
        of_layer = self._dealt[:, layer], self._given[:, layer], self._first[layer], self._device[layer]
        take_turns(ids.astype(np.int64), queue, step.astype(np.int64), self._period, *of_layer, device)
        return device


def layer_holders(placement: Placement, group: int) -> list[Holders]:
    """Holders of experts in every layer; a node of `group` devices."""
    rows = placement.physical_to_logical
    return [holders_of(row_P, placement.slots, placement.num_experts, group) for row_P in rows]


def split_loads(loads: Ints, step: Ints, holders: Holders) -> Floats:
    """Loads of devices `[M, D]` where rows of loads of experts `[M, E]` are split as their step `[M]` is."""
    num_devices = len(holders.held_first) - 1
    load_MD = np.zeros((len(loads), num_devices))
    to_device_PD = np.eye(num_devices)[holders.device]
    for rows in np.split(np.arange(len(step)), np.flatnonzero(np.diff(step)) + 1):
        total = loads[rows].sum(axis=0)
        share_P = served(total, holders) / np.maximum(total, 1)[holders.expert]
        load_MD[rows] = loads[rows][:, holders.expert] @ (share_P[:, None] * to_device_PD)
    return load_MD


def split_ratios(loads: Floats, placement: Placement) -> Floats:
    """Max/mean device load of every step and layer `[B, L]` for loads `[B, L, E]`; 1 without load."""
    units, scale = flow_units(loads)
    alive, ratios = np.count_nonzero(placement.slots), np.ones(loads.shape[:2])
    for layer, holders in enumerate(layer_holders(placement, placement.num_devices)):
        mean_B = loads[:, layer].sum(axis=1) / alive
        most_B = least_of_steps(np.ascontiguousarray(units[:, layer]), holders) / scale
        ratios[:, layer] = np.divide(most_B, mean_B, out=np.ones(len(mean_B)), where=mean_B > 0)
    return ratios


@compiled
def least_of_steps(loads: Ints, holders: Holders) -> Ints:
    """The busiest device's load in every step, `[B]`, of loads `[B, E]`."""
    most = np.empty(len(loads), np.int64)
    for b in range(len(loads)):
        most[b] = least(loads[b], holders)[0]
    return most


@compiled
def take_turns(
    ids: Ints,
    queue: Ints,
    step: Ints,
    period: Ints,
    dealt: NDArray[np.int32],
    given: NDArray[np.int32],
    first: Ints,
    device: Ints,
    chosen: NDArray[np.int32],
) -> None:
    """Write the device of every cell `[T, K]`, the one of its expert's slots that is furthest behind its share.

    Parameters
    ----------
    queue, step
        Of every token, `[T]`.
    period
        Of every step, `[B]`.
    dealt, given
        Pairs of each queue that every slot is to serve in all, and has served so far, `[B, P, Q]`.
    first, device
        The slots of each expert, and their devices, as in `Holders`, in each period `[R, E + 1]`, `[R, P]`.
    """
    for t in range(ids.shape[0]):
        b, q = step[t], queue[t]
        r = period[b]
        for k in range(ids.shape[1]):
            e = ids[t, k]
            if e >= first.shape[1] - 1:
                continue
            start, end = first[r, e], first[r, e + 1]
            if end - start == 1:
                chosen[t, k] = device[r, start]
                continue
            n, i = 0, 1
            for p in range(start, end):
                n += int(dealt[b, p, q])
                i += int(given[b, p, q])
            best = furthest_behind(dealt[b, :, q], given[b, :, q], start, end, n, i)
            given[b, best, q] += 1
            chosen[t, k] = device[r, best]
