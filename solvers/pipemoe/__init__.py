"""PipeMoE: the pipeline degree of an MoE layer (Shi et al., INFOCOM 2023)."""

from .chunks import unequal_chunks
from .degree import TUTEL_MAX_DEGREE, optimal_degree
from .layers import measured_degrees, nested_pairs, optimal_degrees
from .robust import robust_choice
from .seconds import simulate

__all__ = [
    "TUTEL_MAX_DEGREE",
    "measured_degrees",
    "nested_pairs",
    "optimal_degree",
    "optimal_degrees",
    "robust_choice",
    "simulate",
    "unequal_chunks",
]
