"""What a plan's `options` say, so that its figures can be made again."""

from typing import Literal

from pydantic import Field

from ..runtime.plan import DispatchModel, Record

__all__ = ["EvaluationOptions", "PlacementOptions"]


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
