"""The temperatures of annealing, which give every expert's weights their time.

Legend: L MoE layers; E experts a layer; D devices.
"""

import math

import numpy as np
from numpy.typing import NDArray

from .programme import Programme, Terms

__all__ = ["COLD", "Cooling"]

COLD = 0.5  # in units of an expert's weights: what they decide is decided there
FEW = 4  # experts a device, up to which that is so; of more, a device's pull is a sum of more weights
HOTTER, COLDER = 2 / 3, 1 / 2  # powers of the experts a device over FEW by which either end is hotter
STEPS = 256  # of the ladder
MARGIN = 1e-3  # of the ladder at either end, so that units alike but for rounding have steps between them
LEAST = 1e-6  # of the largest unit: experts below have next to no weight


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


def _units(programme: Programme, terms: Terms) -> NDArray[np.float64]:
    """Unit of every expert's weights: their root mean square to each neighbouring layer and inside its own.

    Times what a device is worth more than its node; experts with next to none left away, and 1 where none is left.
    """
    weights = [*programme.weights, *(() if terms.beside is None else terms.beside)]
    rows = [np.sqrt((weight**2).mean(axis=axis)) for weight in weights for axis in (0, 1) if weight.size]
    unit = np.concatenate([*rows, np.zeros(0)]) * (programme.near[0, 0] - programme.node_worth)
    unit = unit[unit > LEAST * unit.max(initial=0.0)]
    return unit if len(unit) else np.ones(1)
