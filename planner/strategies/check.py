"""Input and results of a strategy's recheck: figures side by side, and lists of what was and was not checked."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..certify.recounted import Recounted
    from ..evaluate.evaluate import Evaluated

__all__ = ["Again", "Check", "Told"]


@dataclass(frozen=True, slots=True)
class Again:
    """A plan that is certified on its trace.

    Parameters
    ----------
    task
        The one that the strategy was given, counted anew.
    evaluated
        The plan and its rivals judged by the naive replay; None of a decision that the plan's last one stands on.
    folder
        Where the plan's sidecars are.
    """

    task: "Recounted"
    evaluated: "Evaluated | None"
    folder: Path


@dataclass(frozen=True, slots=True)
class Check:
    """A figure that a plan claims beside the one found again: numbers alike up to rounding, all else equal."""

    what: str
    claimed: Any
    found: Any


@dataclass(frozen=True, slots=True)
class Told:
    """Item of a certificate's list: checked, or unchecked."""

    what: str
    checked: bool
