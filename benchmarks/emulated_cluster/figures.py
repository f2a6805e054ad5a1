"""What a case found: seconds measured beside seconds predicted, of each way to run the same step."""

from dataclasses import dataclass, field

from .timing import Seconds


@dataclass(frozen=True, slots=True)
class Figure:
    """One way to run one step.

    Parameters
    ----------
    instance, method
        The step and the way.
    measured, predicted_s
        Its seconds, and what the profile predicted.
    ratio
        How many times as fast as the instance's first way, with its interval.
    told
        Further figures by name, units as in a study's rows.
    axis, size, curve
        Where in the picture it is a point, and of which curve: the way's, unless told.
    """

    instance: str
    method: str
    measured: Seconds
    predicted_s: float | None = None
    ratio: tuple[float, float, float] | None = None
    told: dict[str, float] = field(default_factory=dict)
    axis: str = ""
    size: float | None = None
    curve: str = ""
