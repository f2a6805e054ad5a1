"""The rendezvous of a launched world: the store that its ranks meet and agree in."""

import datetime
import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import MismatchError, RankError
from .failures import in_words, unreachable
from .launch import Launch

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["JOIN_TIMEOUT_S", "Terms", "check_agreement", "gathered", "launched_store"]

JOIN_TIMEOUT_S = 300.0  # the nodes of a job start minutes apart
Terms = Mapping[str, str]


@functools.cache
def launched_store(launch: Launch) -> Any:
    """The store of the launcher; kept, because rank 0 may be its server.

    Raises
    ------
    RankError
        Rank 0 does not answer.
    """
    import torch.distributed as dist
    from torch.distributed import rendezvous  # type: ignore[attr-defined]

    os.environ.setdefault("MASTER_ADDR", launch.address)
    os.environ.setdefault("MASTER_PORT", str(launch.port))
    timeout = datetime.timedelta(seconds=JOIN_TIMEOUT_S)
    try:
        store, _, _ = next(rendezvous("env://", launch.rank, launch.size, timeout=timeout))
    except dist.DistError as error:
        raise RankError(
            f"rank 0 does not answer at {launch.address}:{launch.port}, where this world should meet"
            f" (rank {launch.rank} waited {JOIN_TIMEOUT_S:g} s at most)"
        ) from error
    return store


def gathered(store: "Store", key: str, value: str, rank: int, size: int) -> tuple[str, ...]:
    """The value that each rank gives under `key`, by rank.

    Raises
    ------
    RankError
        Some do not come within the store's timeout; they are named.
    """
    keys = [f"{key}/{peer}" for peer in range(size)]
    try:
        store.set(f"{key}/{rank}", value)
        store.wait(keys)
        return tuple(store.get(name).decode() for name in keys)
    except RuntimeError as error:
        raise RankError(_absent(store, keys, rank)) from error


def check_agreement(store: "Store", terms: Terms, rank: int, size: int) -> None:
    """Return where every rank gives the same terms.

    Raises
    ------
    MismatchError
        Some differ from rank 0: on every rank the same message, with their numbers, the term and both values.
    """
    texts = gathered(store, "terms", json.dumps(dict(terms)), rank, size)
    first, *others = map(json.loads, texts)
    for peer, other in enumerate(others, 1):
        if other != first:
            name = next(name for name in {**first, **other} if first.get(name) != other.get(name))
            differing = [peer for peer, text in enumerate(texts) if text != texts[0]]
            raise MismatchError(
                f"{in_words(differing)} disagree{'s' * (len(differing) == 1)} with rank 0 about {name}: rank {peer} has"
                f" {other.get(name)}, rank 0 {first.get(name)}; start every rank with the same command and version"
            )


def _absent(store: "Store", keys: Sequence[str], rank: int) -> str:
    """Who did not join, when waiting for all failed."""
    try:
        absent = [peer for peer, name in enumerate(keys) if not store.check([name])]
    except RuntimeError:
        return unreachable(rank)
    return f"{in_words(absent)} did not join within {JOIN_TIMEOUT_S:g} s (noticed by rank {rank})"
