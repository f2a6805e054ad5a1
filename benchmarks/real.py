"""Real counts of samples, as steps of samples in layers."""

from pathlib import Path

import numpy as np

Array = np.ndarray
OLMOE = "olmoe-1b-7b/per_sample_counts.npz"
SMARTMOE = "smartmoe-gpt-moe-training/counts.npz"


def olmoe(data: Path) -> Array:
    """OLMoE's counts, `[8 steps, layers, 64 samples, experts]`."""
    with np.load(data / OLMOE) as arrays:
        counts = arrays["counts"].astype(np.int64)
    return np.asarray(counts.reshape(8, 64, *counts.shape[1:]).transpose(0, 2, 1, 3))


def smartmoe(data: Path) -> Array:
    """SmartMoE's training counts, every 50th iteration: `[steps, layers, 64 micro-batches of ranks, experts]`."""
    with np.load(data / SMARTMOE) as arrays:
        counts = arrays["counts"][::50].astype(np.int64)  # [B, ranks, L, micro-batches, E]
    return np.asarray(counts.transpose(0, 2, 1, 3, 4).reshape(len(counts), counts.shape[2], -1, counts.shape[4]))
