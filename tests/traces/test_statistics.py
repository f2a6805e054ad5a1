"""Statistics on traces whose figures are known."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from moeplan.traces.reader import Trace
from moeplan.traces.schema import PHASES, TokenBatch
from moeplan.traces.statistics import describe

Make = Callable[..., TokenBatch]
MakeTrace = Callable[..., Trace]


def test_everything_is_counted(make_trace: MakeTrace, make_batch: Make) -> None:
    batches = [make_batch(200, seed=seed, known=("step", "sample", "source_rank")) for seed in range(2)]
    found = describe(make_trace(*batches))
    assert found.num_tokens == 400
    for name, number in (
        ("sample", found.num_samples),
        ("step", found.num_steps),
        ("source_rank", found.num_source_ranks),
    ):
        assert number == len(set(np.concatenate([getattr(batch, name) for batch in batches]).tolist()))
    assert found.not_routed == sum((batch.ids == 65_535).sum() for batch in batches)
    assert found.cells == 400 * 3 * 2
    phases = np.concatenate([batch.phase for batch in batches])
    assert found.phase_tokens == {PHASES[phase]: (phases == phase).sum() for phase in range(3)}


def test_what_was_not_recorded_is_unknown(make_trace: MakeTrace, make_batch: Make) -> None:
    found = describe(make_trace(make_batch(20, known=())))
    assert (found.num_samples, found.num_steps, found.num_source_ranks) == (None, None, None)


def test_a_next_expert_that_follows_from_the_current_has_affinity_one(make_trace: MakeTrace, make_batch: Make) -> None:
    batch = make_batch(600, dropped=0.0)
    expert_T = np.arange(600, dtype=np.uint16) % 6
    ids = np.stack([np.stack([(expert_T + layer) % 6, (expert_T + layer + 1) % 6], 1) for layer in range(3)], 1)
    found = describe(make_trace(dataclasses.replace(batch, ids=ids.astype(np.uint16))))
    assert found.affinity.tolist() == [1, 1]
    assert found.chance.tolist() == pytest.approx([1 / 6, 1 / 6])
    assert found.skew.tolist() == [1, 1, 1]


def test_one_busy_expert_has_all_the_skew_and_its_affinity_is_chance(make_trace: MakeTrace, make_batch: Make) -> None:
    batch = make_batch(50)
    ids = np.full((50, 3, 2), 65_535, np.uint16)
    ids[:, :, 0] = 4
    found = describe(make_trace(dataclasses.replace(batch, ids=ids)))
    assert found.skew.tolist() == [6, 6, 6]
    assert found.affinity.tolist() == found.chance.tolist() == [1, 1]


def test_a_trace_that_routes_nothing_has_figures_of_zero(make_trace: MakeTrace, make_batch: Make) -> None:
    found = describe(make_trace(make_batch(10, dropped=1.1)))
    assert found.not_routed == found.cells
    assert found.skew.tolist() == [0, 0, 0]
    assert found.affinity.tolist() == [0, 0]
