"""What a plan's `options` say, so that its figures can be made again."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from ..runtime.plan import DispatchModel, Record

__all__ = ["EvaluationOptions", "PlacementOptions", "SecondsOptions"]


class PlacementOptions(Record):
    """How the placement was decided."""

    strategy: str
    dispatch_model: DispatchModel
    method: str
    backend: str
    time_limit_s: float


class EvaluationOptions(Record):
    """How it was judged: what splits, which phases count, and how homes and steps were found."""

    unit: Literal["sample", "step", "block"]
    phases: tuple[Literal["prefill", "decode", "train"], ...]
    samples_per_step: int = Field(ge=1)
    home: Literal["source_rank", "ordinal"]
    step: Literal["recorded", "derived"]


class SecondsOptions(Record):
    """How seconds were predicted.

    Parameters
    ----------
    sources
        Part (and link class) to the profile's series, or the link, that times it.
    missing
        Part without seconds to the reason.
    extrapolated
        Metric to the largest share, over the judged contenders, of calls outside the sizes measured.
    other_dtype
        Parts timed in a dtype of another width than the model's.
    """

    sources: Mapping[str, str]
    missing: Mapping[str, str]
    extrapolated: Mapping[str, Annotated[float, Field(ge=0, le=1)]]
    other_dtype: tuple[str, ...]
