"""ExFlow: placement by inter-layer expert affinity."""
