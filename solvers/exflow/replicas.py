"""Replicas for the slots that the experts' homes leave free: filled in, then annealed.

In an annealing every slot is an expert of its own, and those of one expert are on different devices.

Legend: L MoE layers; E experts per layer; P slots per layer; D devices, S slots of each.
"""

import itertools
from collections.abc import Callable
from operator import itemgetter

import numpy as np

from ..arrays import Bools, Floats, Ints
from ..placement import Placement
from .budget import Budget
from .programme import Incumbent, Layout, Programme, Terms

MOST_CELLS = 2**25  # of weights between slots; 0.7 GB


def with_replicas(
    programme: Programme, layout: Layout, loads: Floats, value: Callable[[Placement], float], budget: Budget
) -> tuple[float, Placement]:
    """The placement of `layout` whose free slots hold replicas: of the highest loads or the nearest, the better of two.

    With what it is worth.

    Parameters
    ----------
    loads
        `[L, E]`.
    value
        Value of a placement, more is better; of equals the one by loads is taken.
    budget
        Once its time is out, remaining layers get the nearest replicas, which takes next to none, and nothing else is
        tried.

    Notes
    -----
    By loads, each free slot in turn goes to the expert with the highest load a replica, on the device with room where
    its transitions stay nearest; where every device with room holds that expert already, another expert moves there
    and leaves it its slot. The nearest replicas on a device are those that it is worth most to.
    """
    if not programme.has_spare_slots or budget.late:
        only = _filled(programme, layout, None, budget)
        return value(only), only
    found: list[tuple[float, Placement]] = []
    for by in (loads, None):
        if not (found and budget.late):
            filled = _filled(programme, layout, by, budget)
            found.append((value(filled), filled))
    return max(found, key=itemgetter(0))


def _filled(programme: Programme, layout: Layout, loads: Floats | None, budget: Budget) -> Placement:
    """The placement filled by loads, or with the nearest replicas."""
    held_LED = np.stack([np.eye(len(programme.slots), dtype=np.bool_)[device_E] for device_E in layout])
    for layer, held_ED in enumerate(held_LED):
        if held_ED.sum() == len(programme.places):
            continue
        worth_ED = _worth(programme, held_LED, layer)
        if loads is None or budget.late:
            _fill_nearest(held_ED, programme.slots, worth_ED)
        else:
            _fill_by_load(held_ED, programme.slots, loads[layer], worth_ED)
    return Placement.from_sets([_sets(held_ED) for held_ED in held_LED], programme.sizes[0])


def _sets(held_ED: Bools) -> list[list[int]]:
    """The experts of every device, ascending."""
    experts, ends = np.nonzero(held_ED.T)[1].tolist(), np.cumsum(held_ED.sum(axis=0)).tolist()
    return [experts[start:end] for start, end in itertools.pairwise([0, *ends])]


def _fill_nearest(held_ED: Bools, slots_D: Ints, worth_ED: Floats) -> None:
    """Fill every device's free slots with the experts that it lacks and is worth most to, in place.

    Of equals with those that fewest devices hold, so that devices which hold nothing else become different ones.
    """
    cost_ED, count_E, free_D = np.where(held_ED, np.inf, -worth_ED), held_ED.sum(axis=1), slots_D - held_ED.sum(axis=0)
    for device in np.flatnonzero(free_D):
        taken = np.lexsort((count_E, cost_ED[:, device]))[: free_D[device]]
        held_ED[taken, device] = True
        count_E[taken] += 1


def _fill_by_load(held_ED: Bools, slots_D: Ints, load_E: Floats, worth_ED: Floats) -> None:
    """Fill one layer's free slots, in place."""
    count_E, free_D = held_ED.sum(axis=1), slots_D - held_ED.sum(axis=0)
    for _ in range(int(free_D.sum())):
        for expert in np.argsort(-load_E / count_E, kind="stable"):
            if (open_D := (free_D > 0) & ~held_ED[expert]).any():
                filled = device = int(np.where(open_D, worth_ED[expert], -1.0).argmax())
                break
            if (move := _cheapest_move(held_ED, expert, free_D > 0, slots_D, worth_ED)) is not None:
                moved, device, filled = move
                held_ED[moved, [device, filled]] = False, True
                break
        held_ED[expert, device] = True
        count_E[expert] += 1
        free_D[filled] -= 1


def _cheapest_move(
    held_ED: Bools, expert: int, room_D: Bools, slots_D: Ints, worth_ED: Floats
) -> tuple[int, int, int] | None:
    """Cheapest move of another expert to a device with room, so that `expert` can take its place."""
    sources = np.flatnonzero(~held_ED[expert] & (slots_D > 0))
    targets = np.flatnonzero(room_D)
    movable_EUV = held_ED[:, sources, None] & ~held_ED[:, None, targets]
    if not movable_EUV.any():
        return None
    loss_EU = worth_ED[:, sources] - worth_ED[expert, sources]
    loss_EUV = np.where(movable_EUV, loss_EU[:, :, None] - worth_ED[:, None, targets], np.inf)
    moved, source, target = np.unravel_index(loss_EUV.argmin(), loss_EUV.shape)
    return int(moved), int(sources[source]), int(targets[target])


def _worth(programme: Programme, held_LED: Bools, layer: int) -> Floats:
    """Worth of a replica on each device given the neighbouring layers as they stand, `[E, D]`."""
    worth_ED = np.zeros(held_LED.shape[1:])
    if layer > 0:
        shared_ED = held_LED[layer - 1] / held_LED[layer - 1].sum(axis=1, keepdims=True)
        worth_ED += programme.weights[layer - 1].T @ programme.spread(shared_ED)
    if layer < programme.num_layers - 1:
        worth_ED += programme.weights[layer] @ programme.spread(held_LED[layer + 1])
    return worth_ED


def anneal_replicas(programme: Programme, placement: Placement, budget: Budget, rng: np.random.Generator) -> Placement:
    """The placement that annealing leads to from another one with as many replicas of every expert; that one if large.

    For one level of links.

    Notes
    -----
    What a slot's tokens keep does not depend on how many replicas the next expert has, if these are on different
    devices: they use the one at hand. Its own share of an expert's tokens is taken to be the same for all replicas,

        W'[l, s, t] = W[l, e(s), e(t)] / |replicas of e(s)|
    """
    cells = len(programme.weights) * placement.num_slots**2
    if budget.exhausted or cells > MOST_CELLS:
        return placement
    from .rounds import anneal_rounds

    expert_LP, layers = placement.physical_to_logical.astype(np.int64), range(placement.num_layers)
    count_LP = np.stack([np.bincount(row, minlength=placement.num_experts)[row] for row in expert_LP])
    weights = [
        weight[np.ix_(expert_LP[cut], expert_LP[cut + 1])] / count_LP[cut][:, None]
        for cut, weight in enumerate(programme.weights)
    ]
    near, group = programme.near, programme.devices_per_node
    slots = Programme(weights, (placement.num_slots,) * len(layers), programme.slots, near, group)
    terms = Terms(twin=np.where(count_LP > 1, expert_LP, -1))
    incumbent = Incumbent(slots, start=[placement.device_of_slot.copy() for _ in layers])
    anneal_rounds(slots, terms, budget, rng, incumbent, fresh=False)
    held = [
        [np.sort(expert_LP[layer][incumbent.layout[layer] == device]).tolist() for device in range(len(slots.slots))]
        for layer in layers
    ]
    return Placement.from_sets(held, placement.num_experts)
