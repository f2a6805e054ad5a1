"""Routing to place by: Markov transitions, tokens drawn from them, samples with preferences, and real recordings.

Legend: T tokens; I samples; L MoE layers; E experts, of which the generator has two a device.
"""

import json
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np

from moeplan.profilers.cluster import Cluster
from moeplan.traces.reader import open_trace
from moeplan.traces.split import fitted

Array = np.ndarray
GPT_OSS = "gpt-oss-20b/routing.npz"
ALPHA = 0.08
DECODE_EXPERTS, DECODE_TOP_K, KEPT = 256, 8, 0.9
LENGTH, TOP_K, PREFERENCE, SPREAD = 1024, 2, 3.0, 0.08
OLMOE = "olmoe-1b-7b/per_sample_counts.npz"
SMARTMOE = "smartmoe-gpt-moe-training/counts.npz"


@dataclass(frozen=True, slots=True)
class Routing:
    """First choices of recorded tokens, `[T, L]`, and the sample of each, `[T]`."""

    ids: Array
    sample: Array
    num_experts: int

    def transitions(self, kept: Array) -> Array:
        """Transitions of some tokens, by places or mask."""
        return transitions(self.ids[kept], self.num_experts)

    def even(self) -> Array:
        """Whether a token is of an even sample, `[T]`."""
        return np.asarray(self.sample % 2 == 0)

    def half(self, seed: int) -> Array:
        """Whether a token is of the half of the samples that is fitted, `[T]`."""
        samples, of_sample = np.unique(self.sample, return_inverse=True)
        return fitted(samples, seed=seed, fraction=0.5)[of_sample]

    def halves(self, seeds: int) -> list[tuple[Array, Array]]:
        """Transitions of both halves of the samples, a pair a seed."""
        halves = [self.half(seed) for seed in range(seeds)]
        return [(self.transitions(half), self.transitions(~half)) for half in halves]


def gpt_oss(data: Path) -> Routing:
    """gpt-oss-20b's."""
    with np.load(data / GPT_OSS) as arrays:
        ids, sample = arrays["expert_ids"][:, :, 0].astype(np.int64), arrays["seq_id"].astype(np.int64)
        return Routing(ids, sample, int(arrays["num_experts"]))


def gpt_oss_records(data: Path, routing: Routing) -> list[dict[str, Any]]:
    """What is known of each token's sample: its data set, whether it loops."""
    records = {one["seq"]: one for one in json.loads((data / GPT_OSS).with_name("sequences.json").read_text())}
    return [records[sample] for sample in routing.sample.tolist()]


def embedded() -> Routing:
    """The embedded model's, from the trace that ships with it."""
    with as_file(files("moeplan.planner.demo") / "trace.parquet") as path:
        trace = open_trace(path)
        batches = list(trace.batches())
    ids = np.concatenate([batch.ids[:, :, 0] for batch in batches]).astype(np.int64)
    sample = np.concatenate([batch.sample for batch in batches if batch.sample is not None])
    return Routing(ids, sample, trace.model.num_experts)


def transitions(ids: Array, num_experts: int) -> Array:
    """Tokens `[T, L]` that go from an expert of a layer to one of the next, `[L-1, E, E]`."""
    pairs = (ids[:, :-1] * num_experts + ids[:, 1:]).T
    counts = [np.bincount(pair, minlength=num_experts**2) for pair in pairs]
    return np.array(counts, dtype=float).reshape(-1, num_experts, num_experts)


def markov(rng: np.random.Generator, num_layers: int, num_experts: int, alpha: float = ALPHA) -> Array:
    """Balanced transitions `[L-1, E, E]`, every row and column sum 1: rows Dirichlet(alpha), scaled until they are."""
    weights = rng.dirichlet(np.full(num_experts, alpha), (num_layers - 1, num_experts))
    for _ in range(50):
        weights /= weights.sum(axis=1, keepdims=True)
        weights /= weights.sum(axis=2, keepdims=True)
    return weights


def drawn(rng: np.random.Generator, weights: Array, num_tokens: int) -> Array:
    """Independent tokens that follow transitions whose rows sum to 1, `[T, L]`; any first expert is as likely."""
    ids = [rng.integers(weights.shape[1], size=num_tokens)]
    for table in weights.cumsum(axis=2):
        reached = (rng.random(num_tokens)[:, None] > table[ids[-1]]).sum(axis=1)
        ids.append(np.minimum(reached, weights.shape[1] - 1))
    return np.stack(ids, axis=1)


def sample_counts(rng: np.random.Generator, cluster: Cluster, samples_each: int) -> Array:
    """The paper's generator: pairs of tokens and experts of samples, so many a device, `[I, E]`.

    Samples have preferences of their own, Dirichlet(3 / E).
    """
    num_experts = 2 * cluster.num_devices
    taste = rng.dirichlet(np.full(num_experts, PREFERENCE / num_experts), samples_each * cluster.num_devices)
    return rng.multinomial(LENGTH * TOP_K, taste)


def decode_counts(
    rng: np.random.Generator, *, num_steps: int, num_layers: int, kind: str, spread: float, drift: float, pairs: int
) -> Array:
    """Counts of decode steps of 256 experts, `[steps, L, E]`, of so many pairs a layer.

    Shares are log-normal, or Zipf in random order, and at most one token in eight's choice. Their logarithms drift: a
    first-order autoregression of deviation `drift`, nine tenths of which stay from step to step.
    """
    ranks = -spread * np.log(np.arange(1, DECODE_EXPERTS + 1.0))
    usual = rng.normal(0, spread, (num_layers, DECODE_EXPERTS))
    if kind == "Zipf":
        usual = np.array([rng.permutation(ranks) for _ in range(num_layers)])
    counts, off = list[Array](), rng.normal(0, drift, usual.shape)
    for _ in range(num_steps):
        share = np.exp(usual + off)
        share = np.minimum(share / share.sum(axis=1, keepdims=True), 1 / DECODE_TOP_K)
        counts.append(np.array([rng.multinomial(pairs, row / row.sum()) for row in share]))
        off = KEPT * off + np.sqrt(1 - KEPT**2) * rng.normal(0, drift, usual.shape)
    return np.array(counts)


def carried_on(rng: np.random.Generator, counts: Array) -> tuple[Array, Array]:
    """Transitions `[E, E]`, rows Dirichlet(0.08), and the counts `[I, E]` of the next layer that they give."""
    num_experts = counts.shape[1]
    transitions = rng.dirichlet(np.full(num_experts, SPREAD), num_experts)
    return transitions, np.array([sum(map(rng.multinomial, row, transitions)) for row in counts])


def expert_devices(cluster: Cluster) -> Array:
    """The device of every expert `[E]`, in order."""
    return np.arange(2 * cluster.num_devices) // 2


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
