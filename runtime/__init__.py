"""The plan and its execution in a training or inference loop; importing this loads nothing heavy."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .active import load_plan
    from .parallel import parallelize

__all__ = ["load_plan", "parallelize"]

_HOMES = {"load_plan": ".active", "parallelize": ".parallel"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
