"""Failures among the ranks of a launched world: marks and words in their store, and the watchdog that reads them.

All ranks so name the same one in one line, and none hangs.

===========  =====================================================================================================
key          meaning
===========  =====================================================================================================
failed       why the world failed, in a line; the first word stays
beat/RANK    a count that grows while the rank's process lives
lost/RANK    the rank noticed that others are gone
read/RANK    the rank knows why the world failed
left/RANK    the rank left in good order
===========  =====================================================================================================
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from ...errors import MoeplanError, RankError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

WORD_S = 5.0  # for which the others of a failed world are waited for
POLL_S, WATCH_S = 0.1, 0.5  # between two looks at the store
BEATS = 4  # looks in which a living rank's count grows, however busy its machine
READERS_S = 10.0  # for which rank 0, which may keep the store, stays until the others have read why they end
FAILED = "failed"
READ_S = 2.5  # for a process that has word of a failure to end by itself
_ending = threading.Lock()  # of the thread that ends this process: one line, not one a thread
_last_words: list[str] = []  # why the world of this process failed, when its watchdog has read it


def lost_peers(error: Exception) -> bool:
    """Check whether an exception comes from the failure of other ranks (connection closed, collective timed out)."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error)


def where(error: Exception) -> str:
    """The place `file:line` that raised an exception."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "start" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def as_own_failure(error: Exception) -> MoeplanError:
    """A rank's own failure as an error of ours: itself, or a `RankError` that says where the code failed."""
    if isinstance(error, MoeplanError):
        return error
    return RankError(f"failed at {where(error)}: {type(error).__name__}: {error}")


def leave_word(store: "Store", rank: int, error: Exception) -> None:
    """Leave word of this rank's own failure for the others."""
    with contextlib.suppress(RuntimeError):
        store.set(FAILED, f"rank {rank}: {error}")


def accuse(store: "Store", rank: int, dead: Sequence[int]) -> None:
    """Leave word of dead or stopped ranks, unless there is word of a failure already; they are not waited for."""
    for peer in dead:
        store.set(f"read/{peer}", "1")
    if not store.check([FAILED]):
        store.set(FAILED, f"{in_words(dead)} died or stopped (noticed by rank {rank})")


def why_lost(store: "Store", rank: int, size: int, timeout_s: float, error: Exception) -> str:
    """Name the cause of a lost connection: a failure that a rank left word of, ranks that died or hang, or `error`."""
    try:
        store.set(f"lost/{rank}", "1")
        _accuse_missing(store, rank, size, timeout_s)
        if not store.check([FAILED]):
            return f"rank {rank} lost the others, which are alive: {str(error).splitlines()[0]}"
        word = store.get(FAILED).decode()
        store.set(f"read/{rank}", "1")
    except RuntimeError:
        return _last_words[0] if _last_words else unreachable(rank)
    return word


def stay(store: "Store", rank: int, size: int) -> None:
    """Wait, on rank 0, which may keep the store, until the others have left or read why their world failed."""
    until = time.monotonic() + READERS_S
    with contextlib.suppress(RuntimeError):
        while rank == 0 and time.monotonic() < until and unmarked(store, "read", rank, size):
            time.sleep(POLL_S)


def unmarked(store: "Store", mark: str, rank: int, size: int) -> list[int]:
    """The other ranks of this world that have not left a mark: `lost`, `read` or `left`."""
    others = (peer for peer in range(size) if peer != rank and not store.check([f"{mark}/{peer}"]))
    return [peer for peer in others if store.add(f"beat/{peer}", 0)]


def in_words(ranks: Sequence[int]) -> str:
    """Ranks as messages name them: `rank 3`, `ranks 1, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


@contextlib.contextmanager
def watchdog(store: "Store", rank: int, size: int, timeout_s: float) -> Iterator[None]:
    """End this process if it hangs in the block after another rank left word of a failure, or rank 0 fell silent.

    Meanwhile a growing count tells the others that this process lives. After an error rank 0 stays for the others.
    """
    _last_words.clear()
    store.add(f"beat/{rank}", 1)  # a rank that never beat does not belong to this world
    dog = _Watchdog(store, rank, size, timeout_s)
    threads = [threading.Thread(target=target, daemon=True) for target in (dog.look, dog.time_answers)]
    for thread in threads:
        thread.start()
    try:
        yield
    except Exception:
        stay(store, rank, size)
        raise
    finally:
        dog.left.set()
        for thread in threads:
            thread.join(2 * WATCH_S)


def end(word: str | None) -> NoReturn:
    """End this process at once, with `word` as its error."""
    _ending.acquire()
    with contextlib.suppress(OSError):  # whoever read this process's errors may be gone
        print(f"moeplan: {word}", file=sys.stderr, flush=True)
    os._exit(RankError.exit_code)


def unreachable(rank: int) -> str:
    """The word of a rank whose store does not answer."""
    return f"rank {rank} cannot reach rank 0, which keeps the store of this world"


def _accuse_missing(store: "Store", rank: int, size: int, timeout_s: float) -> None:
    """Leave word of the ranks that are gone, unless all noticed the failure or one left word of it.

    A rank whose count stands still has died or was stopped. A rank whose count grows may wait in a collective, which
    gives up after half the time allowed; if it is still silent then, it hangs.
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
    """Ranks that have not noticed a failure by the time `end`; none where one left word of it."""
    while (absent := unmarked(store, "lost", rank, size)) and not store.check([FAILED]) and time.monotonic() < end:
        time.sleep(POLL_S)
    return [] if store.check([FAILED]) else absent


@dataclass(frozen=True, slots=True)
class _Watchdog:
    """Two threads of a rank: one calls the store, one times its answers (no call returns where rank 0 is stopped)."""

    store: "Store"
    rank: int
    size: int
    timeout_s: float
    left: threading.Event = field(default_factory=threading.Event)
    answered: threading.Event = field(default_factory=threading.Event)
    failed: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        """Look for word of a failure; end this process if it does not end by itself after there is some."""
        word, store = None, self.store
        try:
            # Calls of the block hold up others on the same connection.
            store = store.clone() if hasattr(store, "clone") else store
            while word is None and not self.left.wait(WATCH_S):
                store.add(f"beat/{self.rank}", 1)
                word = store.get(FAILED).decode() if store.check([FAILED]) else None
                self.answered.set()
            _last_words.extend([word] if word else [])
            store.set(f"read/{self.rank}", "1")
        except RuntimeError:
            word = word or unreachable(self.rank)
        self.failed.set()
        if word is not None:
            stay(store, self.rank, self.size)
        if not self.left.wait(READ_S):
            end(word)

    def time_answers(self) -> None:
        """End this process when the store has not answered for `timeout_s`, unless there is word of a failure.

        Looks are counted, not seconds: a process that was itself stopped for a while has not looked.
        """
        looks = 0
        while not (self.left.wait(WATCH_S) or self.failed.is_set()):
            looks = 0 if self.answered.is_set() else looks + 1
            self.answered.clear()
            if looks * WATCH_S > max(self.timeout_s, WORD_S):
                end(f"rank 0 did not answer within {self.timeout_s:g} s (noticed by rank {self.rank})")
