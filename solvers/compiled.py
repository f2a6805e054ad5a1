"""Functions compiled by numba. Modules that use it are imported in the call that needs them: numba loads with them."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function, *, any_order: bool = False, inlined: bool = False) -> Function:
    """`function` compiled, cached on disk where there is a folder to cache in, free to run beside other threads.

    Parameters
    ----------
    any_order
        Whether sums and maxima may be taken in any order, several terms at once; of no NaN.
    inlined
        Whether compiled callers take the function's body in: a call counts a reference for every array it is given.
    """
    import numba

    options: dict[str, Any] = {
        "nogil": True,
        "fastmath": {"reassoc", "contract", "nnan", "nsz"} if any_order else False,
        "inline": "always" if inlined else "never",
    }
    try:
        return cast(Function, numba.njit(cache=True, **options)(function))
    except RuntimeError:  # no folder to cache in
        return cast(Function, numba.njit(**options)(function))


inlined = partial(compiled, inlined=True)


def seconds_to_compile(tiny: Callable[[], object]) -> float:
    """Seconds that a tiny call takes, which compiles what larger ones need or loads it."""
    started = time.perf_counter()
    tiny()
    return time.perf_counter() - started
