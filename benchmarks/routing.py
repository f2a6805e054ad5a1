"""Routing to place by: balanced Markov transitions, tokens drawn from them, and what was recorded of real models.

Legend: T tokens; L MoE layers; E experts.
"""

import json
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np

from moeplan.traces.reader import open_trace
from moeplan.traces.split import fitted

Array = np.ndarray
GPT_OSS = "gpt-oss-20b/routing.npz"
ALPHA = 0.08


@dataclass(frozen=True, slots=True)
class Routing:
    """First choices of recorded tokens, `[T, L]`, and the sample of each, `[T]`."""

    ids: Array
    sample: Array
    num_experts: int

    def transitions(self, kept: Array) -> Array:
        """Those of some tokens, by places or mask."""
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
