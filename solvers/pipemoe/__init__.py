"""PipeMoE: the pipeline degree of an MoE layer (Shi et al., INFOCOM 2023)."""

from .chunks import unequal_chunks
from .curves import measured_degrees, tabulated_degrees
from .degree import TUTEL_MAX_DEGREE, optimal_degree
from .layers import optimal_degrees
from .robust import robust_degree
from .simulate import simulate

__all__ = [
    "TUTEL_MAX_DEGREE",
    "measured_degrees",
    "optimal_degree",
    "optimal_degrees",
    "robust_degree",
    "simulate",
    "tabulated_degrees",
    "unequal_chunks",
]
