"""Tasks as workers run them, and as they reach other processes: in bytes, which do with arrays what they like."""

import os
import pickle
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import MoeplanError

Answer = tuple[bool, Any] | bytes  # whether a task ended well, then its result or its error; of others this in bytes

TRIES = 3  # times that a task may lose its worker
FEWER = "memory may have run out: try again, or with fewer --workers"
_place = threading.local()  # `inside`: whether this thread runs a worker's task


@dataclass(frozen=True, slots=True)
class Held:
    """Stands among the arguments of a task for a value that was broadcast."""

    value: Any = None  #: Its bytes, or what a cluster has for them


def num_threads() -> int:
    """Number of threads that a computation may have: one inside a worker, else one per core of this process."""
    return 1 if getattr(_place, "inside", False) else len(os.sched_getaffinity(0))


def answer(task: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    """Run a task as a worker does: what it returns, or its error."""
    outside, _place.inside = getattr(_place, "inside", False), True
    try:
        return True, task(*args)
    except Exception as error:  # noqa: BLE001  whatever it is, who asked tells it
        return False, error
    finally:
        _place.inside = outside


def message(task: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of `reply`: a task in bytes, and the values that it holds."""
    rest = [Held() if isinstance(arg, Held) else arg for arg in args]
    return pickle.dumps((task, rest)), *(arg.value for arg in args if isinstance(arg, Held))


def reply(message: bytes, *values: bytes) -> bytes:
    """Run a task in a worker, with the values that it holds."""
    ended_well, value = answer(_run, message, *values)
    if not ended_well and not isinstance(value, MoeplanError):
        value.add_note(f"in a worker:\n{''.join(traceback.format_exception(value))}")
    try:
        return pickle.dumps((ended_well, value))
    except Exception as error:  # noqa: BLE001  whatever a result makes of being written
        said = f"{type(value).__name__} that cannot be sent ({error}); {value!r:.200}"
        return pickle.dumps((False, RuntimeError(said)))


def _run(message: bytes, *values: bytes) -> Any:
    (task, args), sent = pickle.loads(message), map(pickle.loads, values)  # noqa: S301  written by who gave the task
    return task(*(next(sent) if isinstance(arg, Held) else arg for arg in args))
