"""The locality of samples: how much each keeps to experts of its own.

Legend: I samples; L MoE layers; E experts; K experts per token; J intervals of the unit.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .information import DRAWS, Information, entropy, mutual_information
from .loads import Keyed
from .split import mixed

MAX_SAMPLES = 1024
MAX_BYTES = 128 * 2**20
MIN_ROOM = 1e-9  # bits: what rounding leaves of none


@dataclass(frozen=True, slots=True)
class Locality:
    """Concentration of the expert use of samples."""

    #: `[L]`, from 0 (a sample's tokens choose as all tokens do) to 1 (each sample has K experts that all its tokens
    #: choose), whatever the length of the samples
    index: NDArray[np.float64]
    information: Information  #: What it is made of: bits that the sample of a choice tells of its expert
    num_samples: int  #: Samples looked at
    num_tokens: float  #: Their tokens, mean over layers


def locality(loads_ILE: NDArray[np.int64], top_k: int, *, seed: int, draws: int = DRAWS) -> Locality:
    """The locality of samples with these loads.

    Notes
    -----
    With H(E | S) the bits that are left of a choice's expert once its sample is known, over the choices in a layer,
    and H0 their mean over a null in which every token draws its K experts from the pooled loads,

        index = (H0 - H(E | S)) / (H0 - log2 K),   clipped to [0, 1]; 0 where H0 = log2 K                   (1)

    K different experts per token leave H(E | S) >= log2 K. Few tokens leave little more even of a random choice: H0 has
    samples of the same lengths, which corrects both ends of the scale for it. Samples of one token tell nothing.
    """
    rng = np.random.default_rng(seed)
    layers = [loads_ILE[:, layer] for layer in range(loads_ILE.shape[1])]
    nulls = [list(_null(loads, top_k, rng, draws)) for loads in layers]
    information = Information.of(
        (mutual_information(loads), map(mutual_information, null)) for loads, null in zip(layers, nulls, strict=True)
    )
    left = np.array([_left(loads) for loads in layers])
    by_chance = np.array([np.mean([_left(loads) for loads in null]) for null in nulls])
    room = by_chance - np.log2(top_k)
    index = np.divide(by_chance - left, room, out=np.zeros_like(room), where=room > MIN_ROOM)  # (1)
    tokens = float(loads_ILE.sum(axis=(0, 2)).mean() / top_k)
    return Locality(np.clip(index, 0, 1), information, len(loads_ILE), tokens)


class SampleLoads:
    """The loads of a bounded number of samples, drawn at random from all that come, in one pass.

    Kept are the samples with the smallest hashes: whichever is kept in the end was kept from its first token on.

    Attributes
    ----------
    most
        Samples kept in the end; the others come and go.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.most = max(1, min(MAX_SAMPLES, MAX_BYTES // (16 * num_layers * num_experts)))
        self._row_of_sample: dict[int, int] = {}
        self._table = np.zeros((2 * self.most, num_layers, num_experts), np.int64)
        self._limit = np.uint64(2**64 - 1)

    def keeps(self, samples: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mask of the samples that are still looked at."""
        return np.asarray(mixed(samples) <= self._limit)

    def add(self, sample_R: NDArray[np.int64], layer_R: NDArray[np.int32], counts_RE: NDArray[np.int64]) -> None:
        """Add rows of loads, each of a sample and a layer; those of samples it no longer `keeps` are passed over."""
        for first in range(0, len(sample_R), self.most):
            rows = slice(first, first + self.most)
            kept = self.keeps(sample_R[rows])
            samples, place = np.unique(sample_R[rows][kept], return_inverse=True)
            slots = [self._row_of_sample.setdefault(key, len(self._row_of_sample)) for key in samples.tolist()]
            cells = np.array(slots, np.intp)[place], layer_R[rows][kept]
            np.add.at(self._table, cells, counts_RE[rows][kept])
            if len(self._row_of_sample) > self.most:
                self._shrink()

    def kept(self) -> Keyed:
        """`[I, L, E]` of the samples kept, by ascending id `[I, 1]`."""
        rows = dict(sorted(self._row_of_sample.items()))
        return Keyed(np.array([*rows], np.int64).reshape(-1, 1), self._table[[*rows.values()]])

    def add_loads(self, loads: Keyed) -> None:
        """Add the loads of samples that were kept elsewhere of other tokens."""
        samples, layers = loads.keys[:, 0], np.arange(loads.counts.shape[1], dtype=np.int32)
        counts_RE = loads.counts.reshape(-1, loads.counts.shape[2])
        self.add(np.repeat(samples, len(layers)), np.tile(layers, len(samples)), counts_RE)

    def _shrink(self) -> None:
        samples = np.fromiter(self._row_of_sample, np.int64)
        hashes = mixed(samples)
        order = np.argsort(hashes)[: self.most]
        self._limit = hashes[order[-1]]
        self._table[: self.most] = self._table[order]
        self._table[self.most :] = 0
        self._row_of_sample = {sample: row for row, sample in enumerate(samples[order].tolist())}


def _left(loads_IE: NDArray[np.int64]) -> float:
    """H(E | S) = H(S, E) - H(S), in bits."""
    return entropy(loads_IE) - entropy(loads_IE.sum(1))


def _null(loads_IE: NDArray[np.int64], top_k: int, rng: np.random.Generator, draws: int) -> Iterator[NDArray[np.int64]]:
    """Loads `[I, E]` of samples as long as these, whose tokens draw from the pooled loads.

    Notes
    -----
    Each token is to have K different experts, expert e with probability q_e = K p_e. Systematic sampling gives exactly
    that: lay the q_e end to end, drop u, u + 1, ... on them with one uniform u < 1. The ends, modulo 1, cut the unit
    into J intervals that each mean one set of experts, so that a sample is one multinomial draw over them.
    """
    from scipy.sparse import csr_array

    tokens_I = np.rint(loads_IE.sum(1) / top_k).astype(np.int64)
    pooled_E = loads_IE.sum(0)
    ends_E = np.cumsum(pooled_E) * (top_k / max(1, pooled_E.sum()))
    cuts = np.unique(np.concatenate([[0.0], ends_E % 1.0, [1.0]]))
    lengths_J, middles_J = np.diff(cuts), (cuts[1:] + cuts[:-1]) / 2
    drawn_JK = np.searchsorted(ends_E, middles_J[:, None] + np.arange(top_k)).clip(max=len(ends_E) - 1)
    interval_JK = np.repeat(np.arange(len(lengths_J)), top_k)
    sets_JE = csr_array(
        (np.ones(drawn_JK.size, np.int64), (interval_JK, drawn_JK.reshape(-1))), shape=(len(lengths_J), len(ends_E))
    )
    for _ in range(draws):
        yield rng.multinomial(tokens_I, lengths_J / lengths_J.sum()) @ sets_JE
