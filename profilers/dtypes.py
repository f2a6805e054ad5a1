"""The dtypes of elements by the names that profiles use, and how wide each is."""

from collections.abc import Mapping

__all__ = ["ELEMENT_BYTES"]

ELEMENT_BYTES: Mapping[str, int] = {  # of one width, the one that models use most first
    "fp8": 1,
    "fp8_block": 1,
    "uint8": 1,
    "int8": 1,
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
}
