"""The best layout that a search has found so far."""

from collections.abc import Callable

import numpy as np

from ..outcome import ROUNDING
from .programme import Layout, Programme
from .terms import Terms

__all__ = ["Incumbent"]


class Incumbent:
    """The best layout so far, kept where an interrupted search leaves it.

    Parameters
    ----------
    target
        A bound; a layout that reaches it is optimal and ends the search.
    on_improvement
        Called with the value of each better layout.
    start
        The first layout; by default experts in their own order.
    terms
        What counts for the value besides the programme.
    """

    def __init__(
        self,
        programme: Programme,
        target: float = np.inf,
        on_improvement: Callable[[float], None] | None = None,
        *,
        start: Layout | None = None,
        terms: Terms | None = None,
    ) -> None:
        self.layout = programme.first_layout() if start is None else start
        self.value = (terms or Terms()).value(programme, self.layout)
        self.target = target
        self._on_improvement = on_improvement

    def offer(self, layout: Layout, value: float) -> None:
        """Keep `layout` if it is better, or as good (a kick may then lead on from it)."""
        better = value > self.value
        if value >= self.value:
            self.layout, self.value = list(layout), value
        if better and self._on_improvement:
            self._on_improvement(value)

    @property
    def optimal(self) -> bool:
        """Whether the value meets the bound, up to rounding."""
        return self.value >= self.target * (1 - ROUNDING)
