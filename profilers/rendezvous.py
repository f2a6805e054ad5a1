"""The rendezvous of a launched world: the store that its ranks meet in, agree in, and leave word of failures in."""

import contextlib
import datetime
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import MismatchError, RankError
from .launch import Launch

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = [
    "JOIN_TIMEOUT_S",
    "Terms",
    "accuse",
    "check_agreement",
    "end",
    "gathered",
    "in_words",
    "launched_store",
    "leave_word",
    "stay",
    "unmarked",
    "watchdog",
    "why_lost",
]

JOIN_TIMEOUT_S = 300.0  # the nodes of a job start minutes apart
WORD_S = 5.0  # for which the others of a failed world are waited for
POLL_S, WATCH_S = 0.1, 0.5  # between two looks at the store
BEATS = 4  # looks in which a living rank's count grows, however busy its machine
READ_S = 2.5  # for a process that has word of a failure to end by itself
READERS_S = 10.0  # for which rank 0, which may keep the store, stays until the others have read why they end
FAILED = "failed"
_heard: list[str] = []  # why the world of this process failed, when its watchdog has read it
_ending = threading.Lock()  # of the thread that ends this process: one line, not one a thread
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


def leave_word(store: "Store", rank: int, error: Exception) -> None:
    """Leave word of this rank's own failure for the others."""
    with contextlib.suppress(RuntimeError):
        store.set(FAILED, f"rank {rank}: {error}")


def accuse(store: "Store", rank: int, dead: Sequence[int]) -> None:
    """Leave word of others that are dead or stopped, and so will not read it, unless there is some."""
    for peer in dead:
        store.set(f"read/{peer}", "1")
    if not store.check([FAILED]):
        store.set(FAILED, f"{in_words(dead)} died or stopped (noticed by rank {rank})")


def why_lost(store: "Store", rank: int, size: int, timeout_s: float, error: Exception) -> str:
    """Why this rank lost the others: the failure that one left word of, who died or says nothing, or else `error`."""
    try:
        store.set(f"lost/{rank}", "1")
        _accuse_missing(store, rank, size, timeout_s)
        if not store.check([FAILED]):
            return f"rank {rank} lost the others, which are alive: {str(error).splitlines()[0]}"
        word = store.get(FAILED).decode()
        store.set(f"read/{rank}", "1")
    except RuntimeError:
        return _heard[0] if _heard else _unreachable(rank)
    return word


def stay(store: "Store", rank: int, size: int) -> None:
    """Return, on rank 0, which may keep the store, only when the others have left or read why their world failed."""
    until = time.monotonic() + READERS_S
    with contextlib.suppress(RuntimeError):
        while rank == 0 and time.monotonic() < until and unmarked(store, "read", rank, size):
            time.sleep(POLL_S)


def unmarked(store: "Store", mark: str, rank: int, size: int) -> list[int]:
    """The other ranks of this world that have not left a mark: `lost`, `read` or `left`."""
    others = (peer for peer in range(size) if peer != rank and not store.check([f"{mark}/{peer}"]))
    return [peer for peer in others if store.add(f"beat/{peer}", 0)]


@contextlib.contextmanager
def watchdog(store: "Store", rank: int, size: int, timeout_s: float) -> Iterator[None]:
    """End this process should it hang in the block: with the word that another left, or when rank 0 falls silent.

    Meanwhile it tells the others, by a count that grows, that this process lives. Where rank 0 is stopped no call to
    its store returns, so that the clock runs in another thread than the calls. After an error rank 0 stays for the
    others.
    """
    left, answered, heard = threading.Event(), threading.Event(), threading.Event()
    _heard.clear()
    store.add(f"beat/{rank}", 1)  # who never beat does not belong to this world
    threads = [
        threading.Thread(target=_watch, args=(store, rank, size, left, answered, heard), daemon=True),
        threading.Thread(target=_time, args=(left, answered, heard, rank, timeout_s), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    except Exception:
        stay(store, rank, size)
        raise
    finally:
        left.set()
        for thread in threads:
            thread.join(2 * WATCH_S)


def end(word: str | None) -> NoReturn:
    """End this process at once, with `word` as its error."""
    _ending.acquire()
    with contextlib.suppress(OSError):  # whoever read this process's errors may be gone
        print(f"moeplan: {word}", file=sys.stderr, flush=True)
    os._exit(RankError.exit_code)


def in_words(ranks: Sequence[int]) -> str:
    """Ranks by their ranks, as messages name them."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _watch(
    store: "Store", rank: int, size: int, left: threading.Event, answered: threading.Event, heard: threading.Event
) -> None:
    """Look at the store until there is word of a failure, and end this process if it has not left by itself then."""
    word, mine = None, store
    try:
        mine = store.clone() if hasattr(store, "clone") else store  # a call of the block's would hold up these
        while word is None and not left.wait(WATCH_S):
            mine.add(f"beat/{rank}", 1)
            word = mine.get(FAILED).decode() if mine.check([FAILED]) else None
            answered.set()
        _heard.extend([word] if word else [])
        mine.set(f"read/{rank}", "1")
    except RuntimeError:
        word = word or _unreachable(rank)
    heard.set()
    if word is not None:
        stay(mine, rank, size)
    if not left.wait(READ_S):
        end(word)


def _time(
    left: threading.Event, answered: threading.Event, heard: threading.Event, rank: int, timeout_s: float
) -> None:
    """End this process when rank 0's store has not answered for the whole time, until there is word of a failure.

    Looks are counted, not seconds: a process that was itself stopped for a while has not looked.
    """
    looks = 0
    while not (left.wait(WATCH_S) or heard.is_set()):
        looks = 0 if answered.is_set() else looks + 1
        answered.clear()
        if looks * WATCH_S > max(timeout_s, WORD_S):
            end(f"rank 0 did not answer within {timeout_s:g} s (noticed by rank {rank})")


def _absent(store: "Store", keys: Sequence[str], rank: int) -> str:
    """Who did not join, when waiting for all failed."""
    try:
        absent = [peer for peer, name in enumerate(keys) if not store.check([name])]
    except RuntimeError:
        return _unreachable(rank)
    return f"{in_words(absent)} did not join within {JOIN_TIMEOUT_S:g} s (noticed by rank {rank})"


def _accuse_missing(store: "Store", rank: int, size: int, timeout_s: float) -> None:
    """Leave word of the ranks that are gone; of none where all noticed the failure or one left word of it.

    A rank whose count stands still has died or was stopped. One whose count grows may wait in a collective that gives
    up after half the time allowed; if it says nothing then either, it hangs.
    """
    begun = time.monotonic()
    before = [store.add(f"beat/{peer}", 0) for peer in range(size)]
    absent = _waited_for(store, rank, size, begun + max(min(WORD_S, timeout_s / 4), BEATS * WATCH_S))
    if still := [peer for peer in absent if store.add(f"beat/{peer}", 0) == before[peer]]:
        accuse(store, rank, still)
        return
    if absent := _waited_for(store, rank, size, begun + timeout_s / 2 + 1.0):
        store.set(FAILED, f"{in_words(absent)} did not answer within {timeout_s:g} s (noticed by rank {rank})")


def _waited_for(store: "Store", rank: int, size: int, end: float) -> list[int]:
    """The ranks that notice no failure until this time; none where one left word of it."""
    while (absent := unmarked(store, "lost", rank, size)) and not store.check([FAILED]) and time.monotonic() < end:
        time.sleep(POLL_S)
    return [] if store.check([FAILED]) else absent


def _unreachable(rank: int) -> str:
    return f"rank {rank} cannot reach rank 0, which keeps the store of this world"
