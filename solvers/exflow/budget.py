"""What a search may spend: work, which makes runs repeatable, and time, which caps them."""

import time

__all__ = ["Budget"]


class Budget:
    """Work units that are left and a deadline; the search ends at whichever comes first.

    Parameters
    ----------
    work
        Nanoseconds of a core, by what steps are said to take (`work`); of annealing, a thread.
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
        """Whether time ran out."""
        return time.perf_counter() >= self._deadline

    @property
    def exhausted(self) -> bool:
        """Whether work or time ran out."""
        return self.left <= 0 or self.late

    @property
    def remaining_s(self) -> float:
        """Seconds to the deadline."""
        return max(0.0, self._deadline - time.perf_counter())

    @property
    def capped(self) -> bool:
        """Whether time, not work, ended this budget or a part of it."""
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
