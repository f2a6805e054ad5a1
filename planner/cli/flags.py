"""Flags that commands share, and the words a user may choose from."""

from enum import StrEnum
from typing import Annotated, Any

import typer

__all__ = ["Dispatch", "Json", "Phase", "Phases", "ReplicaRule", "Verbose", "optional"]


class ReplicaRule(StrEnum):
    """Which replica of an expert a token uses."""

    EVEN = "even"
    NEAREST = "nearest"
    STATIC = "static"
    ROUND_ROBIN = "round_robin"


class Dispatch(StrEnum):
    """The dispatch models there are."""

    STANDARD = "standard"
    COHERENT = "coherent"
    MIGRATING = "migrating"


class Phase(StrEnum):
    """The phases of tokens."""

    PREFILL = "prefill"
    DECODE = "decode"
    TRAIN = "train"


def optional(help: str, *names: str, **settings: Any) -> Any:  # noqa: A002  what typer calls it
    """An option without a default to show; `settings` as of `typer.Option`."""
    return typer.Option(*names, help=help, show_default=False, **settings)


Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print all figures, bounds and details.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Phases = Annotated[list[Phase] | None, optional("Only tokens of this phase; may repeat.")]
