"""The proof of a thorough bound, in a file beside its plan: the prices that give it (`solvers.bounds.triples`).

Legend: L MoE layers; E experts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....errors import InputError

__all__ = ["Proof"]

LEVELS = ("device", "node")
MOST_HEADER_BYTES = 4096
MOST_PRICE = 1e18  # sums stay finite


@dataclass(frozen=True, slots=True, eq=False)
class Proof:
    """Prices and floors by level, "device" or "node", float64 `[L, E, E+4]`."""

    levels: Mapping[str, NDArray[np.float64]]

    def to_bytes(self) -> bytes:
        """Dump as a safetensors file, the same bytes every time."""
        from safetensors.numpy import save

        return save({name: np.ascontiguousarray(table) for name, table in self.levels.items()})

    @classmethod
    def from_bytes(cls, contents: bytes, shape: tuple[int, int, int]) -> "Proof":
        """The proof in a file, of this shape.

        Raises
        ------
        InputError
            The file is damaged, holds something else, or numbers too large.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load

        expected = f"expected device or node float64 {list(shape)}, within {MOST_PRICE:g}"
        if len(contents) > MOST_HEADER_BYTES + 8 * len(LEVELS) * math.prod(shape):
            raise InputError(f"no proof of this plan's bound in {len(contents):,} bytes; {expected}")
        try:
            levels = load(contents)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"damaged proof of a bound ({str(error)[:80]}); {expected}") from error
        for name, table in levels.items():
            alike = name in LEVELS and table.dtype == np.float64 and table.shape == shape
            if not alike or not (np.abs(table) <= MOST_PRICE).all():
                raise InputError(f"proof of a bound with {name[:20]!r} {table.dtype} {list(table.shape)}; {expected}")
        return cls(levels)
