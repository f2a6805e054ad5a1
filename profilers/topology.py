"""The topology: which ranks share a node as the machines say, and which as the point-to-point times say."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..errors import InputError

__all__ = ["Pair", "Topology", "islands", "numbered"]

Pair = tuple[int, int]
MIN_RATIO = 2.0  # between the slowest pair of one class and the fastest of the other


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Where the ranks of a measured world lie.

    Parameters
    ----------
    node_of_rank
        The node of each rank, numbered in order of first appearance.
    island_of_rank
        Ranks of one number reach each other faster than others, as measured and told by nobody; all alike where the
        times tell one class only, None where pairs were not measured.
    ratio
        How many times longer the fastest pair between islands takes than the slowest inside one; None without two
        classes.
    """

    node_of_rank: tuple[int, ...]
    island_of_rank: tuple[int, ...] | None = None
    ratio: float | None = None

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        for name, places in (("nodes", self.node_of_rank), ("islands", self.island_of_rank)):
            if places is not None and (places != numbered(places) or len(places) != len(self.node_of_rank)):
                raise InputError(f"{name} of ranks {str(places)[:60]}; expected numbers in order of first appearance")
        two_classes = len(set(self.island_of_rank or ())) > 1
        if not self.node_of_rank or two_classes != (self.ratio is not None) or (self.ratio or MIN_RATIO) < MIN_RATIO:
            raise InputError(f"islands {str(self.island_of_rank)[:60]} {self.ratio} times apart; expected both or none")

    @property
    def agrees(self) -> bool:
        """Whether the times do not contradict the machines."""
        return self.island_of_rank in (None, self.node_of_rank) or self._one_rank_a_node

    @property
    def _one_rank_a_node(self) -> bool:
        """Every pair is between nodes: one class is what is expected."""
        return len(set(self.node_of_rank)) == len(self.node_of_rank) and self.ratio is None

    def __str__(self) -> str:
        nodes, ranks = len(set(self.node_of_rank)), len(self.node_of_rank)
        ranks_and_nodes = f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
        if self.island_of_rank is None:
            return ranks_and_nodes
        if self.ratio is None:
            times = "the point-to-point times tell one class of links"
        else:
            count = len(set(self.island_of_rank))
            times = f"the point-to-point times tell two classes of links, {self.ratio:.1f} times apart: {count} islands"
        return f"{ranks_and_nodes}; {times}{', which are the nodes' * (self.agrees and self.ratio is not None)}"


def numbered(places: Sequence[object]) -> tuple[int, ...]:
    """Each place's number in order of first appearance: `[b, b, a] -> (0, 0, 1)`."""
    order = {place: number for number, place in enumerate(dict.fromkeys(places))}
    return tuple(order[place] for place in places)


def islands(seconds: Sequence[Mapping[Pair, float]], num_ranks: int) -> tuple[tuple[int, ...], float | None]:
    """The island of each rank and the ratio between the two classes, told from the times of pairs alone.

    Parameters
    ----------
    seconds
        Times of all pairs `(first, second)`, once for each size looked at: the smallest tells latencies, the largest
        bandwidths.

    Notes
    -----
    For each size the times are sorted and cut at the largest gap t_(i+1) / t_i. The cut counts when the gap is at
    least 2 and "is fast" is an equivalence relation on the ranks whose classes, the islands, have one size of at
    least 2: else a slow pair would look like a slow link. The cut of the larger gap is taken.
    """
    cuts = [cut for times in seconds if (cut := _cut(times, num_ranks)) is not None]
    return max(cuts, key=lambda cut: cut[1], default=((0,) * num_ranks, None))


def _cut(times: Mapping[Pair, float], num_ranks: int) -> tuple[tuple[int, ...], float] | None:
    ascending = sorted(times.values())
    gaps = [(after / before, before) for before, after in itertools.pairwise(ascending)]
    ratio, slowest_fast = max(gaps, default=(1.0, 0.0))
    if ratio < MIN_RATIO:
        return None
    fast = {pair for pair, time in times.items() if time <= slowest_fast}
    near = [
        frozenset(peer for peer in range(num_ranks) if peer == rank or {(rank, peer), (peer, rank)} & fast)
        for rank in range(num_ranks)
    ]
    partition = sum(map(len, set(near))) == num_ranks  # then near sets are equal or disjoint
    even = len({len(group) for group in near}) == 1 and len(near[0]) >= 2
    return (numbered(near), ratio) if partition and even else None
