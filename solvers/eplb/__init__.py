"""EPLB: replicas for the busiest experts, packed evenly (DeepSeek's published algorithm, and refined)."""

from .published import RawBalance, raw_balance
from .strategy import Method, solve

__all__ = ["Method", "RawBalance", "raw_balance", "solve"]
