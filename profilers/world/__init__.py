"""Worlds of ranks: how their processes start, meet and end, and how one that fails is named on all of them."""

from .run import Target, run_world
from .world import World

__all__ = ["Target", "World", "run_world"]
