"""Forms in which hidden vectors travel between devices, and the bytes that one takes."""

from typing import Literal

from ..profilers.encoded import SCALE_BYTES
from ..traces.model import ModelSpec

Wire = Literal["fp8"]  # an e4m3 number for each element, beside one scale


def copy_bytes(model: ModelSpec, wire: Wire | None) -> int | None:
    """Bytes of a token's hidden vector on its way to another device; None where a size of it is unknown."""
    if wire is None or model.copy_bytes is None or model.hidden_size is None:
        return model.copy_bytes
    return model.hidden_size + SCALE_BYTES
