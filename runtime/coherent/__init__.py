"""Contexts known to all ranks, and inference through them: the coherent forward, and generation (ExFlow)."""
