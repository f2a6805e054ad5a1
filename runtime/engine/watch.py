"""The watch over the ranks of a loop: where one dies or stops, the others end within a time and name it.

Each process tells by a growing count in the store of the default process group that it lives, and looks after the rank
that follows it; a step costs nothing. `profilers.world.failures` has the words and the clocks.
"""

import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from ...errors import MoeplanError, RankError
from ...profilers.world.failures import (
    BEATS,
    FAILED,
    accuse,
    end,
    leave_word,
    lost_peers,
    stay,
    unmarked,
    watchdog,
    where,
    why_lost,
)

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

TIMEOUT_S = 60.0
LOOK_S = 0.5
LEAVE_S = 5.0  # for which rank 0 waits for the others at its end, where it keeps the store
_begun = itertools.count()  # keys of one world never meet those of the next in a shared store
_watch: "Watch | None" = None


def watch(group: dist.ProcessGroup | None = None, *, timeout_s: float = TIMEOUT_S) -> "Watch":
    """The watch of this process over the ranks of `group`; `parallelize` begins it, all ranks together.

    It ends with the process or the process group. A rank that does not answer for half of `timeout_s` is taken for
    dead; the first call says the time.
    """
    global _watch
    if _watch is not None and not _watch.goes_on:
        _watch.close()
        _watch = None
    _watch = _watch or Watch(timeout_s)
    _watch.look_after(group)
    return _watch


@contextlib.contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Raise, in place of a collective's error that tells of lost ranks, one that names them.

    Raises
    ------
    RankError
        In the block a collective failed because of another rank, which is named.
    """
    try:
        yield
    except Exception as error:
        if _watch is None or not lost_peers(error):
            raise
        raise RankError(_watch.why(error)) from error


class Watch:
    """The watch of one process, in threads of its own.

    While it lasts, an error that ends the script is told to the other ranks; a lost rank's is one line without
    traceback and the exit code of `RankError`.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = dist.get_rank(), dist.get_world_size(), timeout_s
        self.store = PrefixStore(f"moeplan/watch/{next(_begun)}", _get_default_store())
        self._agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun keeps the store, not rank 0
        self._world, self._process = dist.group.WORLD, os.getpid()
        self._after: set[int] = set()
        self._keeper_left = False
        self._left, self._open = threading.Event(), contextlib.ExitStack()
        self._open.enter_context(watchdog(self.store, self.rank, self.size, timeout_s))
        self._hook, sys.excepthook = sys.excepthook, self._tell
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def goes_on(self) -> bool:
        """Check whether it still watches the process group that there is now."""
        return not self._left.is_set() and dist.group.WORLD is self._world

    def look_after(self, group: dist.ProcessGroup | None) -> None:
        """Look after the rank that follows this one in `group`."""
        ranks = dist.get_process_group_ranks(group)
        self._after |= {ranks[(ranks.index(self.rank) + 1) % len(ranks)]} - {self.rank}

    def why(self, error: Exception) -> str:
        """Why a collective failed with `error`: who died, stopped, failed or ended before the others."""
        if self._keeper_left:
            why = str(error).splitlines()[0]
            return f"rank 0, which kept the store, ended before others; check that all take as many steps ({why})"
        with contextlib.suppress(RuntimeError):
            ended = [peer for peer in range(self.size) if self.store.check([f"left/{peer}"])]
            if ended and not self.store.check([FAILED]):
                word = f"rank {ended[0]} ended while others need it (noticed by rank {self.rank}); check that all"
                self.store.set(FAILED, f"{word} take as many steps")
        word = why_lost(self.store, self.rank, self.size, self.timeout_s, error)
        stay(self.store, self.rank, self.size)
        return word

    def close(self) -> None:
        """End the watch in good order; where rank 0 keeps the store it waits a little, until the others know."""
        if os.getpid() != self._process:
            return
        if not self._left.is_set():
            with contextlib.suppress(RuntimeError):
                self.store.set(f"left/{self.rank}", "1")
                until = time.monotonic() + LEAVE_S * (self.rank == 0 and not self._agents)
                while self._others_look() and time.monotonic() < until:
                    time.sleep(LOOK_S / 10)
            self._leave()
        if threading.current_thread() is not self._thread:
            self._thread.join(LEAVE_S)  # else Python could end amid a call of the thread's, and torch abort
            atexit.unregister(self.close)

    def _leave(self) -> None:
        self._left.set()
        self._open.close()
        if sys.excepthook == self._tell and not self._keeper_left:
            sys.excepthook = self._hook

    def _others_look(self) -> bool:
        """Check whether others still use the store, of a world that goes well or to read why it does not."""
        others = unmarked(self.store, "read", self.rank, self.size)
        return not all(self.store.check([f"left/{peer}"]) for peer in others)

    def _look(self) -> None:
        """Look after others until the end of the watch, of the process group, or of a rank 0 that keeps the store."""
        store = self.store.clone()  # type: ignore[attr-defined]  # a call of the loop's would hold up these
        seen: dict[int, tuple[int, float]] = {}
        with contextlib.suppress(RuntimeError):  # without its store this process is ended by the watchdog
            while not self._left.wait(LOOK_S):
                if dist.group.WORLD is not self._world:
                    self.close()
                elif not self._agents and store.check(["left/0"]):
                    self._keeper_left = True
                    self.close()
                elif any(self._is_still(peer, store, seen) for peer in self._after):
                    self._accuse(store)

    def _is_still(self, peer: int, store: "Store", seen: dict[int, tuple[int, float]]) -> bool:
        """Check whether the count of a rank that lived has stood still for too many looks."""
        count = store.add(f"beat/{peer}", 0)
        before, looks = seen.get(peer, (0, 0))
        seen[peer] = count, (looks + 1) * (count == before > 0)
        return seen[peer][1] * LOOK_S > self.timeout_s / 2 and not store.check([f"left/{peer}"])

    def _accuse(self, store: "Store") -> None:
        """Leave word, which ends all processes, of the ranks whose counts stand still, if they still do."""
        before = [store.add(f"beat/{peer}", 0) for peer in range(self.size)]
        time.sleep(BEATS * LOOK_S)
        still = [peer for peer, count in enumerate(before) if store.add(f"beat/{peer}", 0) == count > 0]
        if dead := [peer for peer in still if not store.check([f"left/{peer}"])]:
            accuse(store, self.rank, dead)

    def _tell(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Tell what ends the script: an error of ours in one line, anything else as before, and to the others."""
        if os.getpid() != self._process or not isinstance(error, Exception):
            self._hook(kind, error, trace)
            return
        if isinstance(error, RankError) or lost_peers(error):
            sys.stdout.flush()
            end(str(error) if isinstance(error, RankError) else self.why(error))
        if isinstance(error, MoeplanError):
            sys.stdout.flush()
            print(f"moeplan: {error}", file=sys.stderr, flush=True)
            self._leave_word(RankError(str(error)))
            os._exit(error.exit_code)
        self._hook(kind, error, trace)
        self._leave_word(RankError(f"failed at {where(error)}: {kind.__name__}: {error}"))

    def _leave_word(self, error: RankError) -> None:
        """Tell the others why this process ends, which it does by itself."""
        leave_word(self.store, self.rank, error)
        stay(self.store, self.rank, self.size)
        self._leave()
