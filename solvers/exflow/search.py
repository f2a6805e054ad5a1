"""The search: chains from random starts, polished; then kicks to the best one, repaired by sweeps around the kick."""

import math

import numpy as np

from ..compiled import seconds_to_compile
from .budget import Budget, value_work
from .programme import Incumbent, Layout, Programme, Terms
from .sweeps import chain, polish, sweep

__all__ = ["anneal", "compile_annealing", "improve", "search"]

STARTS = 8
START_SHARE = 0.3  # of the work
WIDEST_KICK = 6  # layers
# Kicks without gain that end a search: so many, and so many an expert, because the places that a kick can be tried at
# grow with the experts and each should see a few; it ends small programmes that no bound proves, WORK ends the others.
PATIENCE = 500, 4


def improve(programme: Programme, terms: Terms, budget: Budget, rng: np.random.Generator, incumbent: Incumbent) -> None:
    """Improve `incumbent` by annealing, from a polished chain where nothing but the programme counts."""
    if incumbent.optimal or budget.late:
        return
    if terms.plain and programme.weights:
        part = Budget(START_SHARE * budget.left, math.sqrt(START_SHARE) * budget.remaining_s)
        _start(programme, part, rng, incumbent, starts=1)
        budget.settle(part)
    anneal(programme, terms, budget, rng, incumbent)


def anneal(programme: Programme, terms: Terms, budget: Budget, rng: np.random.Generator, incumbent: Incumbent) -> None:
    """Improve `incumbent`, whose layout is worth to begin with, by annealing."""
    from .rounds import anneal_rounds

    anneal_rounds(programme, terms, budget, rng, incumbent)


def compile_annealing() -> float:
    """Seconds to compile what anneals, or to load it."""

    def tiny() -> None:
        from .rounds import compile_rounds

        compile_rounds()

    return seconds_to_compile(tiny)


def search(programme: Programme, budget: Budget, rng: np.random.Generator, incumbent: Incumbent) -> None:
    """Improve `incumbent` until the budget is spent or its bound is met."""
    if incumbent.optimal or budget.late:
        return
    _start(programme, budget, rng, incumbent)
    movable = np.flatnonzero(programme.slots)
    if len(movable) > 1 and programme.weights:
        _climb(programme, budget, rng, incumbent)


def _start(
    programme: Programme, budget: Budget, rng: np.random.Generator, incumbent: Incumbent, starts: int = STARTS
) -> None:
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
