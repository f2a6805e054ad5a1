"""Hugging Face checkpoints with their experts in the order of a plan, and back; no tensor is decoded.

In a permuted checkpoint the new expert s of a layer is the old expert p[s], p the layer's row of the placement. Engines
that cut the experts of a layer into contiguous runs, one a rank, then have the plan's placement without knowing of it.
"""

from .permuting import Permuted, Restored, permute, undo

__all__ = ["Permuted", "Restored", "permute", "undo"]
