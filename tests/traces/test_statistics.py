"""Statistics on traces whose figures are known."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.traces.count_form import read_counts, tabulate, write_counts
from moeplan.traces.counts import count
from moeplan.traces.reader import Trace
from moeplan.traces.schema import PHASES, TokenBatch
from moeplan.traces.statistics import Statistics, describe, describe_counts

Make = Callable[..., TokenBatch]
MakeTrace = Callable[..., Trace]


def tokens_of(found: Statistics) -> Any:
    return found.tokens


def locality_of(found: Statistics) -> Any:
    return found.locality


def test_everything_is_counted(make_trace: MakeTrace, make_batch: Make) -> None:
    batches = [make_batch(200, seed=seed, known=("step", "sample", "source_rank")) for seed in range(2)]
    found = describe(make_trace(*batches))
    assert tokens_of(found).counts.num_tokens == 400
    for name, number in (
        ("sample", found.num_samples),
        ("step", found.num_steps),
        ("source_rank", found.num_source_ranks),
    ):
        assert number == len(set(np.concatenate([getattr(batch, name) for batch in batches]).tolist()))
    assert tokens_of(found).not_routed == sum((batch.ids == 65_535).sum() for batch in batches)
    assert tokens_of(found).cells == 400 * 3 * 2
    phases = np.concatenate([batch.phase for batch in batches])
    assert tokens_of(found).phase_tokens == {PHASES[phase]: (phases == phase).sum() for phase in range(3)}


def test_what_was_not_recorded_is_unknown(make_trace: MakeTrace, make_batch: Make) -> None:
    found = describe(make_trace(make_batch(20, known=())))
    assert (found.num_samples, found.num_steps, found.num_source_ranks) == (None, None, None)


def test_a_next_expert_that_follows_from_the_current_has_affinity_one(make_trace: MakeTrace, make_batch: Make) -> None:
    batch = make_batch(600, dropped=0.0)
    expert_T = np.arange(600, dtype=np.uint16) % 6
    ids = np.stack([np.stack([(expert_T + layer) % 6, (expert_T + layer + 1) % 6], 1) for layer in range(3)], 1)
    found = describe(make_trace(dataclasses.replace(batch, ids=ids.astype(np.uint16))))
    assert tokens_of(found).affinity.tolist() == [1, 1]
    assert tokens_of(found).chance.tolist() == pytest.approx([1 / 6, 1 / 6])
    assert found.skew.tolist() == [1, 1, 1]


def test_one_busy_expert_has_all_the_skew_and_its_affinity_is_chance(make_trace: MakeTrace, make_batch: Make) -> None:
    batch = make_batch(50)
    ids = np.full((50, 3, 2), 65_535, np.uint16)
    ids[:, :, 0] = 4
    found = describe(make_trace(dataclasses.replace(batch, ids=ids)))
    assert found.skew.tolist() == [6, 6, 6]
    assert tokens_of(found).affinity.tolist() == tokens_of(found).chance.tolist() == [1, 1]


def test_a_trace_that_routes_nothing_has_figures_of_zero(make_trace: MakeTrace, make_batch: Make) -> None:
    found = describe(make_trace(make_batch(10, dropped=1.1)))
    assert tokens_of(found).not_routed == tokens_of(found).cells
    assert found.skew.tolist() == [0, 0, 0]
    assert tokens_of(found).affinity.tolist() == [0, 0]


def test_counts_of_a_trace_have_its_figures_but_for_those_of_tokens(
    make_trace: MakeTrace, make_batch: Make, tmp_path: Path
) -> None:
    trace = make_trace(make_batch(400, known=("step", "sample"), dropped=0.0))
    meta = trace.meta.model_copy(update={"form": "counts"})
    write_counts(tmp_path / "counts", meta, tabulate(trace))
    whole, found = describe(trace), describe_counts(read_counts(tmp_path / "counts"))
    assert found.tokens is None
    assert (found.num_samples, found.num_steps, found.num_source_ranks) == (whole.num_samples, whole.num_steps, None)
    np.testing.assert_array_equal(found.loads, whole.loads)
    np.testing.assert_array_equal(found.skew, whole.skew)
    np.testing.assert_array_equal(locality_of(found).information.bits, locality_of(whole).information.bits)
    np.testing.assert_array_equal(locality_of(found).index, locality_of(whole).index)


def test_samples_with_experts_of_their_own_are_local_and_random_ones_are_not(
    make_trace: MakeTrace, make_batch: Make
) -> None:
    batch = make_batch(2000, dropped=0.0)
    assert batch.sample is not None
    own = ((batch.sample % 3)[:, None, None] * 2 + np.arange(2)).repeat(3, axis=1).astype(np.uint16)
    local = locality_of(describe(make_trace(dataclasses.replace(batch, ids=own), name="own")))
    rng = np.random.default_rng(0)
    alike = rng.permuted(np.tile(np.arange(6, dtype=np.uint16), (2000, 3, 1)), axis=2)[..., :2].copy()
    none = locality_of(describe(make_trace(dataclasses.replace(batch, ids=alike), name="alike")))
    assert local.num_samples == len(np.unique(batch.sample))
    assert local.index.min() > 0.95
    assert none.index.max() < 0.01


def test_a_trace_without_samples_has_no_locality(make_trace: MakeTrace, make_batch: Make) -> None:
    assert describe(make_trace(make_batch(20, known=("step",)))).locality is None


def test_a_chain_of_layers_has_information_and_shuffled_layers_have_none(
    make_trace: MakeTrace, make_batch: Make
) -> None:
    batch = make_batch(3000, dropped=0.0)
    batch.ids[:, 1, 0] = (batch.ids[:, 0, 0] + 1) % 6
    information = tokens_of(describe(make_trace(batch))).information
    assert information.bits[0] == pytest.approx(np.log2(6), abs=0.01)
    assert abs(information.excess[1]) < 5 * information.spread[1] < 0.02


def test_coactivation_is_counted_only_where_it_is_asked_for(make_trace: MakeTrace, make_batch: Make) -> None:
    trace = make_trace(make_batch(50))
    assert tokens_of(describe(trace)).counts.coactivation is None
    counted = count(trace, coactivation=True).coactivation
    np.testing.assert_array_equal(tokens_of(describe(trace, coactivation=True)).counts.coactivation, counted)
