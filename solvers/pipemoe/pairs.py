"""Pairs of degrees, one a pass: those that cut a layer into the fewest pieces.

A backward chunk takes back what whole calls of the experts made forward, so a layer of degrees f and b is computed in
pieces cut at the boundaries of both, f + b - gcd(f, b) of them, each a call with its start-up. Where one degree divides
the other these are max(f, b), as few as either pass has alone; other pairs have more.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["nested_pairs"]


def nested_pairs(max_degree: int) -> NDArray[np.int64]:
    """Forward and backward degrees up to a limit of which one divides the other, `[P, 2]`.

    Fewest pieces first, then fewest chunks, then fewest forward.
    """
    divided = [(fewer, more) for fewer in range(1, max_degree + 1) for more in range(fewer, max_degree + 1, fewer)]
    pairs = {*divided, *(pair[::-1] for pair in divided)}
    return np.array(sorted(pairs, key=lambda pair: (max(pair), sum(pair), pair)))
