"""NetMoE: every layer's combine delivers each sample to the device where its next experts are (solvers/netmoe)."""

from .policy import SamplePolicyOptions
from .strategy import solve

__all__ = ["SamplePolicyOptions", "solve"]
