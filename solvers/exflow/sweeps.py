"""Chains of assignments, and sweeps: steps that never lose value, repeated until none gains; kicks, and sweeps again.

With one expert a device and one level of links the chain is optimal: relabelling makes layer pairs independent.

Legend: E experts per layer; D devices; N nodes of G devices.
"""

from collections.abc import Iterable

import numpy as np

from ..arrays import Floats, Ints
from ..assignment import assign_places
from ..moves import best_labels
from .budget import Budget, layer_work, naming_work, value_work
from .programme import Incumbent, Layout, Programme, Terms

TOLERANCE = 1e-12  # gains below this share of what is at stake are rounding
STARTS = 8
START_SHARE = 0.3  # of the work
WIDEST_KICK = 6  # layers
# Kicks without gain that end a search: so many, and so many an expert, because the places that a kick can be tried at
# grow with the experts and each should see a few; it ends small programmes that no bound proves, WORK ends the others.
PATIENCE = 500, 4


def polish(programme: Programme, layout: Layout, budget: Budget) -> None:
    """Sweep and relabel, in place, until neither gains or the budget is spent."""
    gained = True
    while gained and not budget.exhausted:
        sweep(programme, layout, budget, range(programme.num_layers))
        gained = relabel(programme, layout, budget)


def sweep(programme: Programme, layout: Layout, budget: Budget, layers: Iterable[int]) -> None:
    """Reassign `layers` and whatever they unsettle, up and down, until no layer gains or the budget is spent.

    Notes
    -----
    One layer between two fixed neighbours is a transportation problem, solved exactly.
    """
    waiting, upward = set(layers), True
    while waiting:
        for layer in sorted(waiting, reverse=not upward):
            if budget.exhausted:
                return
            waiting.discard(layer)
            if _reassign(programme, layout, layer, budget):
                waiting.update(near for near in (layer - 1, layer + 1) if 0 <= near < programme.num_layers)
        upward = not upward


def relabel(programme: Programme, layout: Layout, budget: Budget) -> bool:
    """Rename the devices of all layers beyond each cut at their best, in place; whether that gained.

    Notes
    -----
    Renaming changes no cut but this one, since `near` is blind to which node and which of its devices is which.
    """
    gained = False
    num_devices = len(programme.slots)
    for cut in range(len(programme.weights)):
        if budget.exhausted:
            break
        worth_DD = name_worth(programme, layout[cut], layout[cut + 1], cut)
        label_D = best_labels(worth_DD, programme.slots, programme.devices_per_node)
        budget.spend(naming_work(programme))
        if gains(worth_DD, label_D, np.arange(num_devices)):
            layout[cut + 1 :] = [label_D[device_E] for device_E in layout[cut + 1 :]]
            gained = True
    return gained


def name_worth(programme: Programme, here_E: Ints, there_E: Ints, cut: int) -> Floats:
    """Weight that a layer pair keeps per device of its later layer and name `[name now, name then]`, `[D, D]`."""
    num_devices = len(programme.slots)
    pair_EE = here_E[:, None] * num_devices + there_E
    flow_DD = np.bincount(pair_EE.ravel(), programme.weights[cut].ravel(), num_devices**2)
    return flow_DD.reshape(num_devices, num_devices).T @ programme.near


def gains(worth: Floats, found: Ints, held: Ints) -> bool:
    """Check whether giving row i column `found[i]` is worth more than `held[i]`, beyond rounding."""
    row = np.arange(len(worth))
    now = float(worth[row, held].sum())
    return float(worth[row, found].sum()) > now + TOLERANCE * abs(now)


def _reassign(programme: Programme, layout: Layout, layer: int, budget: Budget) -> bool:
    """Give one layer its best homes, in place; whether that gained."""
    worth_ED = programme.worth(layout, layer)
    found_E = assign_places(-worth_ED, programme.places)
    budget.spend(layer_work(len(found_E), len(programme.places)))
    if not gains(worth_ED, found_E, layout[layer]):
        return False
    layout[layer] = found_E
    return True


def chain(programme: Programme, start: int, budget: Budget, rng: np.random.Generator) -> Layout:
    """The layout that grows from a random layer `start` in both directions, each layer optimal for the one given.

    With one expert a device and one level of links, devices that no layer needs are the same in all layers, so that
    replicas find them free in all. Layers that time does not reach hold experts in their own order; work ends none.
    """
    layout, dealt = programme.first_layout(), rng.permutation(programme.places)[: max(programme.sizes)]
    layout[start] = dealt[: programme.sizes[start]]
    same = programme.slots.max() == 1 and not programme.node_worth
    places = np.sort(dealt) if same else programme.places
    for layer in range(start + 1, programme.num_layers):
        if budget.late:
            return layout
        layout[layer] = assign_places(-programme.before(layout, layer), places)
        budget.spend(layer_work(programme.sizes[layer], len(places)))
    for layer in reversed(range(start)):
        if budget.late:
            return layout
        layout[layer] = assign_places(-programme.after(layout, layer), places)
        budget.spend(layer_work(programme.sizes[layer], len(places)))
    return layout


def search(programme: Programme, terms: Terms, budget: Budget, rng: np.random.Generator, incumbent: Incumbent) -> None:
    """Improve `incumbent` until the budget is spent or its bound is met; nothing may count but the programme."""
    assert terms.plain
    if incumbent.optimal or budget.late:
        return
    start(programme, budget, rng, incumbent)
    movable = np.flatnonzero(programme.slots)
    if len(movable) > 1 and programme.weights:
        _climb(programme, budget, rng, incumbent)


def start(
    programme: Programme, budget: Budget, rng: np.random.Generator, incumbent: Incumbent, starts: int = STARTS
) -> None:
    """Offer chains from random layers, polished, for a share of the work."""
    until = budget.left * (1 - START_SHARE)
    for _ in range(starts):
        layout = chain(programme, int(rng.integers(programme.num_layers)), budget, rng)
        polish(programme, layout, budget)
        incumbent.offer(layout, programme.value(layout))
        if incumbent.optimal or budget.late or budget.left <= until:
            break


def _climb(programme: Programme, budget: Budget, rng: np.random.Generator, incumbent: Incumbent) -> None:
    """Kick, sweep around the kick, keep what is no worse."""
    cuts = [programme.cut_value(incumbent.layout, cut) for cut in range(len(programme.weights))]
    patience = left = PATIENCE[0] + PATIENCE[1] * sum(programme.sizes)
    while left and not (budget.exhausted or incumbent.optimal):
        layout = list(incumbent.layout)
        sweep(programme, layout, budget, _kick(programme, layout, rng))
        moved = [new is not old for new, old in zip(layout, incumbent.layout, strict=True)]
        changed = np.flatnonzero(np.logical_or(moved[:-1], moved[1:]))
        found = list(cuts)
        for cut in changed.tolist():
            found[cut] = programme.cut_value(layout, cut)
        budget.spend(len(changed) * value_work(programme))
        left = patience if sum(found) > incumbent.value else left - 1
        if sum(found) >= incumbent.value:
            incumbent.offer(layout, sum(found))
            cuts = found


def _kick(programme: Programme, layout: Layout, rng: np.random.Generator) -> range:
    """Deal the experts of two devices anew (or swap them whole) over a few layers; the layers to sweep."""
    width = int(rng.integers(1, min(WIDEST_KICK, programme.num_layers) + 1))
    first = int(rng.integers(programme.num_layers - width + 1))
    one, other = rng.choice(np.flatnonzero(programme.slots), size=2, replace=False)
    whole = programme.slots[one] == programme.slots[other] and rng.random() < 0.5
    for layer in range(first, first + width):
        device_E = layout[layer].copy()
        on_either = np.flatnonzero((device_E == one) | (device_E == other))
        dealt = device_E[on_either]
        device_E[on_either] = one + other - dealt if whole else rng.permutation(dealt)
        layout[layer] = device_E
    return range(max(0, first - 1), min(programme.num_layers, first + width + 1))
