"""ExFlow: placement by inter-layer expert affinity (papers: ExFlow, arXiv 2401.08383)."""

from .strategy import solve

__all__ = ["solve"]
