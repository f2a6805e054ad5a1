"""Recordings of the separate ranks of an engine, put together."""

from collections.abc import Collection, Iterable, Mapping

from ...errors import InputError
from .hidden_layers import spans

__all__ = ["check_ranks", "common_steps", "first_of_each"]


def check_ranks(ranks: Collection[int]) -> None:
    """Refuse a set of ranks with holes: what the missing ones had would be missing from every sum."""
    if missing := sorted(set(range(max(ranks) + 1)) - set(ranks)):
        raise InputError(
            f"ranks {spans(sorted(ranks))} and not {spans(missing)}; expected the files of all ranks together"
        )


def common_steps(steps_of_rank: Mapping[int, Collection[int]], what: str) -> tuple[list[int], list[str]]:
    """The steps that all ranks recorded, ascending, and what is to be said of the others.

    Raises
    ------
    InputError
        There is none.
    """
    every, common = set[int]().union(*steps_of_rank.values()), set(next(iter(steps_of_rank.values())))
    for steps in steps_of_rank.values():
        common &= set(steps)
    if not common:
        raise InputError(f"no {what} that all {len(steps_of_rank)} ranks recorded; expected the ranks of one recording")
    left_out = len(every) - len(common)
    return sorted(common), [f"{left_out:,} {what} left out, which not all ranks recorded"] if left_out else []


def first_of_each(digests: Iterable[tuple[int, bytes]]) -> tuple[list[int], list[str]]:
    """The ranks that recorded tokens of their own, and what is to be said of those that recorded another's.

    Parameters
    ----------
    digests
        By rank a hash of everything it recorded. Ranks that share their tokens (tensor parallel attention) agree in
        all of it; each token would be there several times.
    """
    first: dict[bytes, int] = {}
    repeated = [rank for rank, digest in sorted(digests) if first.setdefault(digest, rank) != rank]
    said = f"ranks {spans(repeated)} recorded the very tokens of others (tensor parallel attention): left out"
    return sorted(first.values()), [said] if repeated else []
