"""Upper bounds on the transitions that any placement keeps on a device (or node): by pairs or by triples of layers."""

from .pairs import KeptBound, kept_bound, row_bound, spectral_bound, transportation_bound
from .thorough import ThoroughBound, thorough_bound

__all__ = [
    "KeptBound",
    "ThoroughBound",
    "kept_bound",
    "row_bound",
    "spectral_bound",
    "thorough_bound",
    "transportation_bound",
]
