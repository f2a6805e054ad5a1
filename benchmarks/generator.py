"""The paper's generator: samples with preferences of their own, which one transition matrix may carry on.

Legend: I samples; E experts, two a device.
"""

import numpy as np

from moeplan.profilers.cluster import Cluster

Array = np.ndarray
LENGTH, TOP_K, ALPHA, SPREAD = 1024, 2, 3.0, 0.08


def sample_counts(rng: np.random.Generator, cluster: Cluster, samples_each: int) -> Array:
    """The pairs of tokens and experts of samples, so many a device, preferences Dirichlet(3 / E): `[I, E]`."""
    num_experts = 2 * cluster.num_devices
    taste = rng.dirichlet(np.full(num_experts, ALPHA / num_experts), samples_each * cluster.num_devices)
    return rng.multinomial(LENGTH * TOP_K, taste)


def carried_on(rng: np.random.Generator, counts: Array) -> tuple[Array, Array]:
    """Transitions `[E, E]`, rows Dirichlet(0.08), and the counts `[I, E]` of the next layer that they give."""
    num_experts = counts.shape[1]
    transitions = rng.dirichlet(np.full(num_experts, SPREAD), num_experts)
    return transitions, np.array([sum(map(rng.multinomial, row, transitions)) for row in counts])


def expert_devices(cluster: Cluster) -> Array:
    """The device of every expert `[E]`, in order."""
    return np.arange(2 * cluster.num_devices) // 2
