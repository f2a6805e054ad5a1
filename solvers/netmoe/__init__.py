"""NetMoE: samples move to the node, then the device, that holds most of their experts (papers: NetMoE, ICLR 2025)."""

from .prediction import global_next, predict_next, sample_transitions
from .rehoming import METHODS, Rehomed, Way, compile_rehoming, rehome
from .strategy import NetMoeResult, solve, two_stages
from .traffic import Locality, Traffic, Volumes, locality, traffic_of, volumes

__all__ = [
    "METHODS",
    "Locality",
    "NetMoeResult",
    "Rehomed",
    "Traffic",
    "Volumes",
    "Way",
    "compile_rehoming",
    "global_next",
    "locality",
    "predict_next",
    "rehome",
    "sample_transitions",
    "solve",
    "traffic_of",
    "two_stages",
    "volumes",
]
