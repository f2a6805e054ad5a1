"""Functions that torch.compile leaves as they are, for the compiler to load only where it is used.

Both `torch.compiler.disable` and the decorator behind it load the compiler, seconds of every rank, at the first call.
"""

import functools
import sys
from collections.abc import Callable
from typing import TypeVar, cast

from torch._compile import _disable_dynamo

Function = TypeVar("Function", bound=Callable[..., object])


def uncompiled(function: Function) -> Function:
    """`function`, which is called as it is from compiled code, too."""
    disabled = _disable_dynamo(function)

    @functools.wraps(function)
    def called(*args: object, **kwargs: object) -> object:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return cast(Function, called)
