"""Routing traces: schema, writer, reader, recorder, importers, counts and splits.

`record(model, path)` records a training loop; it loads what it needs when it is first looked at.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .recording.loop import record

__all__ = ["record"]


def __getattr__(name: str) -> Any:
    if name != "record":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .recording.loop import record

    return record
