"""Worlds of ranks: how their processes start, meet and end, and how one that fails is named on all of them."""

from .world import Target, World, run_world

__all__ = ["Target", "World", "run_world"]
