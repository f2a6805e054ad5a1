"""Functions compiled by numba. Modules that use it are imported in the call that needs them: numba loads with them."""

import hashlib
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
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
        found = numba.njit(cache=True, **options)(function)
        found._cache._cache_file._source_stamp = source_hash()  # else of the function's own file, without its callees
    except (AttributeError, RuntimeError):  # nothing is compiled, or no folder to cache in
        found = numba.njit(**options)(function)
    return cast(Function, found)


inlined = partial(compiled, inlined=True)


@cache
def source_hash() -> str:
    """Hash of the files of all solvers: code that is compiled holds that of the functions it calls."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def seconds_to_compile(tiny: Callable[[], object]) -> float:
    """Seconds that a tiny call takes, which compiles what larger ones need or loads it."""
    started = time.perf_counter()
    tiny()
    return time.perf_counter() - started
