"""Finding contenders and their figures in a part of an evaluation."""

from ...errors import InputError
from ...runtime.plan import Contender, Part

__all__ = ["find", "ours_and_base", "value"]


def ours_and_base(part: Part) -> tuple[Contender, Contender]:
    """The plan, and what engines do without one."""
    return part.contenders[0], find(part, "contiguous/standard")


def find(part: Part, label: str) -> Contender:
    """The contender of that label."""
    for contender in part.contenders:
        if contender.label == label:
            return contender
    raise InputError(f"the plan's evaluation lacks {label}; re-run moeplan solve")


def value(contender: Contender, metric: str) -> float:
    """A figure that every evaluation has."""
    if metric not in contender.metrics:
        raise InputError(f"the plan's evaluation of {contender.name} lacks {metric}; re-run moeplan solve")
    return contender.metrics[metric].value
