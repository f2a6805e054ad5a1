"""Statistics, information and locality of traces whose figures are known, planted or absent."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moeplan.planner.demo.text import record_embedded, record_text
from moeplan.traces import locality as module
from moeplan.traces.count_form import read_counts, tabulate, write_counts
from moeplan.traces.information import Information, affinity_information, entropy, mutual_information
from moeplan.traces.locality import SampleLoads, locality
from moeplan.traces.schema import PHASES
from moeplan.traces.statistics import describe, describe_counts, gini, gini_by_chance
from tests.builders import known
from tests.traces.builders import COUNTS_META, MakeTrace, make_batch


def test_everything_is_counted(make_trace: MakeTrace) -> None:
    batches = [make_batch(200, seed=seed, known=("step", "sample", "source_rank")) for seed in range(2)]
    found = describe(make_trace(*batches))
    assert known(found.tokens).counts.num_tokens == 400
    numbers = {"sample": found.num_samples, "step": found.num_steps, "source_rank": found.num_source_ranks}
    for name, number in numbers.items():
        assert number == len(set(np.concatenate([getattr(batch, name) for batch in batches]).tolist()))
    assert known(found.tokens).not_routed == sum((batch.ids == 65_535).sum() for batch in batches)
    assert known(found.tokens).cells == 400 * 3 * 2
    assert known(found.tokens).counts.coactivation is None
    assert known(describe(make_trace(batches[0], name="one"), coactivation=True).tokens).counts.coactivation is not None
    phases = np.concatenate([batch.phase for batch in batches])
    assert known(found.tokens).phase_tokens == {PHASES[phase]: (phases == phase).sum() for phase in range(3)}


def test_affinity_is_one_of_a_chain_chance_of_one_busy_expert_and_zero_of_nothing(make_trace: MakeTrace) -> None:
    batch = make_batch(600, dropped=0.0)
    expert_T = np.arange(600, dtype=np.uint16) % 6
    ids = np.stack([np.stack([(expert_T + layer) % 6, (expert_T + layer + 1) % 6], 1) for layer in range(3)], 1)
    found = describe(make_trace(dataclasses.replace(batch, ids=ids.astype(np.uint16)), name="chain"))
    assert known(found.tokens).affinity.tolist() == [1, 1]
    assert known(found.tokens).chance.tolist() == pytest.approx([1 / 6, 1 / 6])
    assert known(found.tokens).information.bits.tolist() == pytest.approx([np.log2(6)] * 2)
    assert found.skew.tolist() == [1, 1, 1]
    ids[:, :, 0], ids[:, :, 1] = 4, 65_535
    busy = describe(make_trace(dataclasses.replace(batch, ids=ids.astype(np.uint16)), name="busy"))
    assert busy.skew.tolist() == [6, 6, 6]
    assert known(busy.tokens).affinity.tolist() == known(busy.tokens).chance.tolist() == [1, 1]
    nothing = describe(make_trace(make_batch(10, dropped=1.1, known=()), name="nothing"))
    assert (nothing.num_samples, nothing.num_steps, nothing.num_source_ranks, nothing.locality) == (None,) * 4
    assert known(nothing.tokens).not_routed == known(nothing.tokens).cells
    assert nothing.skew.tolist() == [0, 0, 0]
    assert known(nothing.tokens).affinity.tolist() == [0, 0]


def test_counts_of_a_trace_have_its_figures_but_for_those_of_tokens(make_trace: MakeTrace, tmp_path: Path) -> None:
    trace = make_trace(make_batch(400, known=("step", "sample"), dropped=0.0))
    write_counts(tmp_path / "counts", COUNTS_META, tabulate(trace))
    whole, found = describe(trace), describe_counts(read_counts(tmp_path / "counts"))
    loads_ILE = np.zeros((known(whole.num_samples), 3, 6), np.int64)
    (batch,) = trace.batches()
    sample_T = np.unique(known(batch.sample), return_inverse=True)[1]
    np.add.at(loads_ILE, (sample_T[:, None, None], np.arange(3)[:, None], batch.ids), 1)
    np.testing.assert_array_equal(
        known(whole.locality).information.bits, locality(loads_ILE, 2, seed=0).information.bits
    )
    assert found.tokens is None
    assert (found.num_samples, found.num_steps, found.num_source_ranks) == (whole.num_samples, whole.num_steps, None)
    np.testing.assert_array_equal(found.loads, whole.loads)
    np.testing.assert_array_equal(found.skew, whole.skew)
    np.testing.assert_array_equal(known(found.locality).information.bits, known(whole.locality).information.bits)
    np.testing.assert_array_equal(known(found.locality).index, known(whole.locality).index)


TABLES = hnp.arrays(np.int64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=5), elements=st.integers(0, 50))


def naive(table: np.ndarray) -> float:
    """sum_ab p_ab log2(p_ab / (p_a p_b)), cell by cell."""
    total, bits = table.sum(), 0.0
    for a in range(table.shape[0]):
        for b in range(table.shape[1]):
            if table[a, b]:
                joint = table[a, b] / total
                bits += joint * math.log2(joint / (table[a].sum() / total * table[:, b].sum() / total))
    return bits


def transitions(first_T: np.ndarray, next_T: np.ndarray, experts: int) -> np.ndarray:
    table = np.zeros((1, experts, experts), np.int64)
    np.add.at(table[0], (first_T, next_T), 1)
    return table


@given(TABLES)
def test_it_is_that_of_plain_loops(table: np.ndarray) -> None:
    assert mutual_information(table) == pytest.approx(naive(table), abs=1e-9)
    assert mutual_information(table) == pytest.approx(mutual_information(table.T), abs=1e-9)


def test_entropy_is_log2_of_as_many_equal_choices() -> None:
    assert entropy(np.full(8, 5)) == pytest.approx(3)
    assert entropy(np.array([0, 7, 0])) == 0
    assert entropy(np.zeros(3, np.int64)) == 0


def test_independent_layers_are_within_the_spread_of_the_null() -> None:
    rng = np.random.default_rng(0)
    skewed = rng.dirichlet(np.full(32, 0.3))
    tables = [transitions(rng.choice(32, 3000, p=skewed), rng.choice(32, 3000, p=skewed[::-1]), 32) for _ in range(20)]
    found = affinity_information(np.concatenate(tables), seed=1, draws=50)
    assert np.abs(found.excess / found.spread).mean() < 1.5
    assert np.abs(found.excess).max() < 5 * found.spread.max()
    assert found.bits.min() > 0.05  # the plain estimate alone would claim a dependence


def test_the_null_is_that_of_tokens_shuffled_one_by_one() -> None:
    rng = np.random.default_rng(0)
    first = rng.choice(6, 400, p=rng.dirichlet(np.ones(6)))
    following = np.where(rng.random(400) < 0.5, first, rng.integers(6, size=400))
    found = affinity_information(transitions(first, following, 6), seed=2, draws=300)
    shuffled = [mutual_information(transitions(first, rng.permutation(following), 6)[0]) for _ in range(300)]
    assert found.shuffled[0] == pytest.approx(np.mean(shuffled), rel=0.05)
    assert found.spread[0] == pytest.approx(np.std(shuffled), rel=0.25)
    assert found.excess[0] > 10 * found.spread[0]


def test_the_spread_is_what_a_few_draws_show_of_all_there_could_be() -> None:
    assert Information.of([(0.0, [1.0, 3.0])]).spread.tolist() == pytest.approx([math.sqrt(2)])


def test_a_seed_gives_the_same_null_again_and_nothing_routed_gives_zeros() -> None:
    rng = np.random.default_rng(0)
    table = transitions(rng.integers(5, size=200), rng.integers(5, size=200), 5)
    assert affinity_information(table, seed=7).shuffled == affinity_information(table, seed=7).shuffled
    assert affinity_information(table, seed=7).shuffled != affinity_information(table, seed=8).shuffled
    empty = affinity_information(np.zeros((2, 4, 4), np.int64), seed=0)
    assert (empty.bits.tolist(), empty.shuffled.tolist()) == ([0, 0], [0, 0])
    assert affinity_information(np.zeros((0, 4, 4), np.int64), seed=0).bits.shape == (0,)


E = 16


def drawn(rng: np.random.Generator, samples: int, tokens: int, top_k: int, loads_E: np.ndarray) -> np.ndarray:
    """`[I, 1, E]`: loads of samples whose tokens each draw `top_k` different experts, one token at a time."""
    loads = np.zeros((samples, 1, E), np.int64)
    for sample in range(samples):
        for _ in range(tokens):
            loads[sample, 0, rng.choice(E, top_k, replace=False, p=loads_E)] += 1
    return loads


@pytest.mark.parametrize(
    ("top_k", "tokens", "samples"), [(1, 40, 60), (4, 40, 60), (1, 1, 400), (2, 2, 400), (2, 5, 400)]
)
def test_samples_that_draw_alike_have_no_locality_however_short(top_k: int, tokens: int, samples: int) -> None:
    rng = np.random.default_rng(0)
    shares_E = rng.dirichlet(np.full(E, 2.0)) if tokens == 40 else np.full(E, 1 / E)
    found = locality(drawn(rng, samples, tokens, top_k, shares_E), top_k, seed=0, draws=40)
    assert found.index[0] < (0.01 if tokens == 40 else 0.03)
    if tokens == 40:
        assert abs(found.information.excess[0]) < 3 * found.information.spread[0]
        assert found.information.shuffled[0] > 0.01
    assert found.num_samples == samples


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
def test_the_more_a_sample_keeps_to_itself_the_higher_the_index(top_k: int) -> None:
    rng, last = np.random.default_rng(1), 0.0
    own = rng.multinomial(300, rng.dirichlet(np.full(E, 0.2), size=40))[:, None]
    for share in (0.25, 0.5, 0.75, 1.0):
        loads = np.rint((1 - share) * own.mean(0, keepdims=True) + share * own).astype(np.int64)
        found = locality(loads, top_k, seed=0)
        left, by_chance = (
            entropy(loads.sum(0)) - bits for bits in (found.information.bits, found.information.shuffled)
        )
        assert found.index == pytest.approx((by_chance - left) / (by_chance - np.log2(top_k)), abs=0.01)
        assert found.index[0] > last
        last = found.index[0]


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
    assert len(kept) == len(found.kept().counts) == 10
    for sample, loads in zip(kept, found.kept().counts, strict=True):
        for layer in range(2):
            rows_of = (sample_R == sample) & (layer_R == layer)
            assert loads[layer].tolist() == counts_RE[rows_of].sum(0).tolist()


def test_gini_is_that_of_all_pairs_and_by_chance_that_of_even_draws() -> None:
    rng = np.random.default_rng(0)
    loads_LE = np.array([[5, 5, 5, 5], [0, 0, 0, 8], [1, 2, 3, 10], [0, 0, 0, 0]])
    pairs = [sum(abs(a - b) for a in row for b in row) / (2 * 4 * max(sum(row), 1)) for row in loads_LE.tolist()]
    assert gini(loads_LE).tolist() == pytest.approx(pairs)
    even_LE = rng.multinomial(4000, np.full(16, 1 / 16), size=400)
    assert gini_by_chance(even_LE[:1])[0] == pytest.approx(gini(even_LE).mean(), rel=0.05)


def test_random_tokens_of_a_model_are_told_from_text_and_overstate_its_skew(tmp_path: Path) -> None:
    text = record_text()
    letters = "".join(map(chr, np.random.default_rng(0).integers(32, 127, len(text))))
    real, made_up = (describe(record_embedded(one, tmp_path / name)) for name, one in (("a", text), ("b", letters)))
    assert not real.as_of_random_tokens
    assert made_up.as_of_random_tokens
    assert np.median(made_up.gini) > 1.2 * np.median(real.gini)
    assert not dataclasses.replace(made_up, locality=None).as_of_random_tokens  # nothing is known without samples
    even = np.full_like(made_up.loads, made_up.loads.mean())
    assert not dataclasses.replace(made_up, gini=gini(even)).as_of_random_tokens
    short = dataclasses.replace(known(made_up.locality), num_tokens=known(made_up.locality).num_samples * 10.0)
    assert not dataclasses.replace(made_up, locality=short).as_of_random_tokens
