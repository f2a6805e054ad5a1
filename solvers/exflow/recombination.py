"""The best layout that takes every layer's partition from one of several layouts.

Legend: L MoE layers; M layouts; D devices.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..moves import best_labels
from .programme import Layout, Programme
from .sweeps import name_worth
from .terms import Terms

__all__ = ["recombine"]


def recombine(programme: Programme, terms: Terms, layouts: Sequence[Layout]) -> Layout:
    """The best layout whose every layer is that of some given layout with its devices renamed.

    Notes
    -----
    Renaming makes layer pairs independent: a pair of partitions keeps what the best renaming of the later one keeps,
    so that the best sequence of partitions is a shortest path through L stages of M (Viterbi).
    """
    choices = range(len(layouts))
    best = np.array([terms.inside(programme, layout, 0) for layout in layouts])
    back, labels = [], []
    for cut in range(len(programme.weights)):
        joined = [[_joined(programme, here[cut], there[cut + 1], cut) for there in layouts] for here in layouts]
        total_MM = best[:, None] + [[worth for worth, _ in row] for row in joined]
        back.append(total_MM.argmax(axis=0))
        labels.append([joined[back[-1][there]][there][1] for there in choices])
        best = total_MM.max(axis=0) + [terms.inside(programme, layout, cut + 1) for layout in layouts]
    path = [int(best.argmax())]
    for from_M in reversed(back):
        path.append(int(from_M[path[-1]]))
    path.reverse()
    name_D = np.arange(len(programme.slots))
    found = [layouts[path[0]][0]]
    for cut, chosen in enumerate(path[1:]):
        name_D = name_D[labels[cut][chosen]]
        found.append(name_D[layouts[chosen][cut + 1]])
    return found


def _joined(
    programme: Programme, here_E: NDArray[np.int64], there_E: NDArray[np.int64], cut: int
) -> tuple[float, NDArray[np.int64]]:
    """What a layer pair keeps when the devices of the later layer are renamed at their best, and the names `[D]`."""
    worth_DD = name_worth(programme, here_E, there_E, cut)
    label_D = best_labels(worth_DD, programme.slots, programme.devices_per_node)
    return float(worth_DD[np.arange(len(label_D)), label_D].sum()), label_D
