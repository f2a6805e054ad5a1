"""The locality of samples: planted, absent, and from a bounded number of them."""

import numpy as np
import pytest

from moeplan.traces import locality as module
from moeplan.traces.information import entropy
from moeplan.traces.locality import SampleLoads, locality

E = 16


def drawn(rng: np.random.Generator, samples: int, tokens: int, top_k: int, loads_E: np.ndarray) -> np.ndarray:
    """`[I, 1, E]`: loads of samples whose tokens each draw `top_k` different experts, one token at a time."""
    loads = np.zeros((samples, 1, E), np.int64)
    for sample in range(samples):
        for _ in range(tokens):
            loads[sample, 0, rng.choice(E, top_k, replace=False, p=loads_E)] += 1
    return loads


@pytest.mark.parametrize("top_k", [1, 4])
def test_samples_that_draw_alike_have_none(top_k: int) -> None:
    rng = np.random.default_rng(0)
    found = locality(drawn(rng, 60, 40, top_k, rng.dirichlet(np.full(E, 2.0))), top_k, seed=0, draws=40)
    assert found.index[0] < 0.01
    assert abs(found.information.excess[0]) < 3 * found.information.spread[0]
    assert found.information.shuffled[0] > 0.01
    assert found.num_samples == 60


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("tokens", [4, 16, 128, 2000])
def test_samples_with_experts_of_their_own_have_all_there_can_be_however_short(top_k: int, tokens: int) -> None:
    loads = np.zeros((5, 2, 5 * top_k), np.int64)
    for sample in range(5):
        loads[sample, :, sample * top_k : (sample + 1) * top_k] = tokens
    found = locality(loads, top_k, seed=0)
    assert found.information.bits.tolist() == pytest.approx([np.log2(5)] * 2)
    assert found.index.tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_short_samples_that_draw_alike_have_none(top_k: int, tokens: int) -> None:
    rng = np.random.default_rng(0)
    found = locality(drawn(rng, 400, tokens, top_k, np.full(E, 1 / E)), top_k, seed=0, draws=40)
    assert found.index[0] < 0.03


def test_the_more_a_sample_keeps_to_itself_the_higher_the_index() -> None:
    rng = np.random.default_rng(1)
    own = rng.multinomial(300, rng.dirichlet(np.full(E, 0.2), size=40))[:, None]
    mixed = [
        locality(np.rint((1 - share) * own.mean(0, keepdims=True) + share * own).astype(np.int64), 1, seed=0).index[0]
        for share in (0.25, 0.5, 0.75, 1.0)
    ]
    assert mixed == sorted(mixed)
    assert mixed[0] > 0


def test_nothing_routed_and_a_single_expert_have_none() -> None:
    assert locality(np.zeros((4, 2, 3), np.int64), 2, seed=0).index.tolist() == [0, 0]
    assert locality(np.full((4, 1, 1), 9), 1, seed=0).index.tolist() == [0]


def test_each_draw_of_the_null_has_the_pooled_loads_and_distinct_experts_a_token() -> None:
    rng = np.random.default_rng(0)
    loads = drawn(rng, 30, 50, 3, rng.dirichlet(np.full(E, 1.0)))[:, 0]
    (null,) = module._null(loads, 3, rng, 1)
    assert null.sum(1).tolist() == [150] * 30
    assert null.max() <= 50
    assert entropy(null.sum(0)) == pytest.approx(entropy(loads.sum(0)), abs=0.02)


def test_kept_samples_keep_all_their_loads_however_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SAMPLES", 10)
    rng = np.random.default_rng(0)
    sample_R = rng.integers(-50, 50, 3000)
    layer_R, counts_RE = rng.integers(0, 2, 3000).astype(np.int32), rng.integers(0, 9, (3000, 3))
    found = SampleLoads(2, 3)
    for first in range(0, 3000, 70):
        rows = slice(first, first + 70)
        found.add(sample_R[rows], layer_R[rows], counts_RE[rows])
    kept = [sample for sample in np.unique(sample_R) if found.keeps(np.array([sample]))[0]]
    assert len(kept) == len(found.loads()) == 10
    for sample, loads in zip(kept, found.loads(), strict=True):
        for layer in range(2):
            rows_of = (sample_R == sample) & (layer_R == layer)
            assert loads[layer].tolist() == counts_RE[rows_of].sum(0).tolist()


def test_few_samples_are_all_kept() -> None:
    found = SampleLoads(1, 2)
    found.add(np.array([5, 3]), np.zeros(2, np.int32), np.array([[1, 2], [3, 4]]))
    assert found.loads().tolist() == [[[3, 4]], [[1, 2]]]
