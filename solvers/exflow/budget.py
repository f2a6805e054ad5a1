"""Budgets of a search, what its steps cost, and the temperatures of annealing, which give every weight its time.

Work makes runs repeatable, and time caps them. Work is in nanoseconds of a core of 2024, the same on every machine.

Legend: L MoE layers; E experts per layer; D devices.
"""

import math
import time

import numpy as np

from ..arrays import Floats
from ..moves import naming_group
from .programme import Programme, Terms

WIDEST = 4  # experts that a block move deals from each of two devices, at most
BLOCK = 2_000  # a block move
MOVE = 400  # and each of its layers
PER_PLACE = 0.05  # and each of its places, a pair of experts dealt
PER_WAY = 20  # and each way to deal
PER_WAYS = 0.12  # and each pair of ways of neighbouring layers
PER_CHOICE = 9  # and each expert of either device, where not all are dealt
PER_FIELD, PER_OWN = 12, 4  # and each two experts dealt, and each way, where others stay
PER_LINK, PER_LINKED = 4, 0.3  # and each two experts dealt, and each way they go, where pairs inside a layer count
PER_STEEP = 1.5  # more where the pair is summed by itself (`messages.sum_over`)
STEP = 24_000  # a layer that is assigned or named anew, around the assignment solver
CALL = 6_000  # a call of the assignment solver
PER_CELL, PER_CELL_PLACE = 15, 1 / 40  # and each cell of its matrix, and each cell and place
PER_TRANSITION = 4  # a weight that is added to others
COLD = 0.5  # in units of an expert's weights: what they decide is decided there
FEW = 4  # experts per device, up to which that is so; of more, a device's pull is a sum of more weights
HOTTER, COLDER = 2 / 3, 1 / 2  # powers of the experts per device over FEW by which either end is hotter
STEPS = 256  # of the ladder
MARGIN = 1e-3  # of the ladder at either end, so that units alike but for rounding have steps between them
LEAST = 1e-6  # of the largest unit: experts below have next to no weight


class Budget:
    """Work units that are left and a deadline; the search ends at whichever comes first.

    Parameters
    ----------
    work
        Nanoseconds of a core, by what steps are said to take; of annealing, a thread.
    time_limit_s
        Seconds from now.
    """

    def __init__(self, work: float, time_limit_s: float) -> None:
        self.left = self.total = work
        self._deadline = time.perf_counter() + time_limit_s
        self._capped = False

    def spend(self, work: float) -> None:
        """Take `work` off what is left."""
        self.left -= work

    @property
    def late(self) -> bool:
        """Check whether time ran out."""
        return time.perf_counter() >= self._deadline

    @property
    def exhausted(self) -> bool:
        """Check whether work or time ran out."""
        return self.left <= 0 or self.late

    @property
    def remaining_s(self) -> float:
        """Seconds to the deadline."""
        return max(0.0, self._deadline - time.perf_counter())

    @property
    def capped(self) -> bool:
        """Check whether time, not work, ended this budget or a part of it."""
        return self._capped or self.late

    def part(self, share: float) -> "Budget":
        """A budget with a share of the work and of the time that is left; `settle` charges what it spends."""
        return Budget(self.left * share, self.remaining_s * share)

    def cap(self) -> None:
        """Note that time ended what others did within this budget."""
        self._capped = True

    def settle(self, part: "Budget") -> None:
        """Charge what a part has spent."""
        self.left -= part.total - part.left
        self._capped |= part.capped


def block_work(programme: Programme, terms: Terms) -> float:
    """Work of a block move, mean over devices: up to `WIDEST` experts of each of two dealt anew in every layer."""
    slots, places = programme.slots[programme.slots > 0], len(programme.places)
    layer = np.mean([_move_work(size, places, linked=terms.beside is not None) for size in slots.tolist()])
    return BLOCK + programme.num_layers * float(layer)


def layer_work(num_experts: int, num_places: int) -> float:
    """Work of assigning the experts of a layer to places at their best, with their worth there."""
    return STEP + _assignment_work(num_experts, num_places)


def naming_work(programme: Programme) -> float:
    """Work of naming the devices of a layer at their best for the layer before (`best_labels`)."""
    group = naming_group(len(programme.slots), programme.devices_per_node)
    num_nodes = len(programme.slots) // group
    inside, nodes = _assignment_work(group, group), _assignment_work(num_nodes, num_nodes)
    return STEP + num_nodes**2 * inside + nodes + value_work(programme)


def value_work(programme: Programme) -> float:
    """Work of summing what a layer pair keeps under a layout."""
    return PER_TRANSITION * max(programme.sizes) ** 2


def _assignment_work(rows: int, num_places: int) -> float:
    """Work of solving an assignment problem."""
    return CALL + rows * num_places * (PER_CELL + PER_CELL_PLACE * num_places)


def _move_work(slots: int, num_places: int, *, linked: bool) -> float:
    """Work of dealing anew, in one layer, the experts of two devices of `slots` slots each."""
    m = min(slots, WIDEST)
    ways = math.comb(2 * m, m)
    work = MOVE + PER_PLACE * num_places * m**2 + PER_WAY * ways + PER_WAYS * ways**2
    if linked:
        work += PER_LINK * (2 * m) ** 2 + PER_LINKED * math.comb(2 * m, 2) * ways
    if slots > m:
        work += PER_CHOICE * 2 * slots + PER_FIELD * (2 * m) ** 2 + PER_OWN * ways
    return work


class Cooling:
    """A fall of the temperature.

    Of an expert whose weights have the unit u, it is decided where it goes between h u and c u, on a logarithmic scale:

        h = hot (S / FEW)^HOTTER,  c = COLD (S / FEW)^COLDER,  S = max(E / D, FEW)

    Every part of the scale takes time in proportion to the units that are decided there:

        share(T) = sum_e u_e min(1, max(0, log(h u_e / T) / log(h / c))) / sum_e u_e

    Where all units are alike it falls from h u to c u.
    """

    def __init__(self, programme: Programme, terms: Terms, hot: float) -> None:
        unit = _units(programme, terms)
        log = np.log(unit)
        weight, edges = np.histogram(log, STEPS, (log.min() - MARGIN, log.max() + MARGIN), weights=unit)
        more = max(max(programme.sizes) / (FEW * np.count_nonzero(programme.slots)), 1.0)
        hottest, coldest = hot * more**HOTTER, COLD * more**COLDER
        some, width = weight > 0, math.log(hottest / coldest)
        weight, decided = weight[some], ((edges[1:] + edges[:-1]) / 2)[some] + math.log(hottest)
        self._ladder = np.linspace(decided[-1], decided[0] - width, STEPS + 1)
        reached = np.clip((decided - self._ladder[:, None]) / width, 0, 1)
        self._share = reached @ weight / weight.sum()

    def at(self, share: float) -> float:
        """The temperature after a share of the time."""
        return math.exp(np.interp(share, self._share, self._ladder))


def _units(programme: Programme, terms: Terms) -> Floats:
    """Unit of every expert's weights: their root mean square to each neighbouring layer and inside its own.

    Times what a device is worth more than its node; experts with next to none left away, and 1 where none is left.
    """
    weights = [*programme.weights, *(() if terms.beside is None else terms.beside)]
    rows = [np.sqrt((weight**2).mean(axis=axis)) for weight in weights for axis in (0, 1) if weight.size]
    unit = np.concatenate([*rows, np.zeros(0)]) * (programme.near[0, 0] - programme.node_worth)
    unit = unit[unit > LEAST * unit.max(initial=0.0)]
    return unit if len(unit) else np.ones(1)
