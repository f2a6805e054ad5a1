"""Counts against a twin of plain loops, and their additivity."""

from collections import Counter as Tally
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moeplan.errors import UsageError
from moeplan.traces.counts import Counter, Pairs, count
from moeplan.traces.model import ModelSpec
from moeplan.traces.reader import Trace, open_trace
from moeplan.traces.schema import PHASES, TokenBatch
from moeplan.traces.split import BLOCK_ROWS, fitted

Make = Callable[..., TokenBatch]
MakeTrace = Callable[..., Trace]
L, E, DROPPED = 3, 6, 65_535


def naive(batch: TokenBatch, pairs: Pairs, rows: Any = None) -> tuple[Any, Any, Any]:
    """Loads, transitions and co-activation, token by token."""
    loads, transitions, together = np.zeros((L, E)), np.zeros((L - 1, E, E)), np.zeros((L, E, E))
    for token in range(len(batch)) if rows is None else np.flatnonzero(rows):
        for layer in range(L):
            cells = batch.ids[token, layer].tolist()
            for expert, times in Tally(cells).items():
                if expert != DROPPED:
                    loads[layer, expert] += times
            for i in range(len(cells)):
                for j in range(len(cells)):
                    if i != j and DROPPED not in (cells[i], cells[j]):
                        together[layer, cells[i], cells[j]] += 1
                    if layer and (i == 0 or pairs in ("all", "weighted")) and (j == 0 or pairs != "top1"):
                        a, b = int(batch.ids[token, layer - 1, i]), cells[j]
                        assert batch.weights is not None
                        gate = float(batch.weights[token, layer - 1, i]) * float(batch.weights[token, layer, j])
                        if DROPPED not in (a, b):
                            transitions[layer - 1, a, b] += gate if pairs == "weighted" else 1
    return loads, transitions, together


@pytest.mark.parametrize("pairs", ["top1", "first", "all", "weighted"])
def test_counts_are_those_of_plain_loops(make_trace: MakeTrace, make_batch: Make, pairs: Pairs) -> None:
    batch = make_batch(300, top_k=3)
    counts = count(make_trace(batch, top_k=3), pairs=pairs, coactivation=True)
    loads, transitions, together = naive(batch, pairs)
    np.testing.assert_array_equal(counts.loads, loads)
    np.testing.assert_allclose(counts.transitions, transitions, rtol=1e-12)
    np.testing.assert_array_equal(counts.coactivation, together)
    assert counts.num_tokens == 300
    assert counts.transitions.dtype == (np.float64 if pairs == "weighted" else np.int64)
    assert counts.loads.shape == (L, E)


@pytest.mark.parametrize("known", [("sample",), ("step",), ()])
def test_only_kept_units_are_counted(make_trace: MakeTrace, make_batch: Make, known: tuple[str, ...]) -> None:
    batch = make_batch(900, known=known)
    unit_T = batch.sample if "sample" in known else batch.step if "step" in known else np.arange(900) // BLOCK_ROWS
    assert unit_T is not None
    counts = count(make_trace(batch), keep=lambda unit_U: unit_U % 2 == 0)
    rows = unit_T % 2 == 0
    np.testing.assert_array_equal(counts.transitions, naive(batch, "top1", rows)[1])
    assert counts.num_tokens == rows.sum()


def test_only_the_phases_asked_for_are_counted(make_trace: MakeTrace, make_batch: Make) -> None:
    batch = make_batch(300)
    counts = count(make_trace(batch), phases=["decode"])
    rows = batch.phase == PHASES.index("decode")
    np.testing.assert_array_equal(counts.loads, naive(batch, "top1", rows)[0])


def test_counts_of_parts_add_up_to_those_of_the_whole(make_trace: MakeTrace, make_batch: Make) -> None:
    batches = [make_batch(100, seed=seed) for seed in range(3)]
    whole = make_trace(*batches)
    parts = [count(make_trace(batch, name=f"part{i}"), coactivation=True) for i, batch in enumerate(batches)]
    total, together = parts[0] + parts[1] + parts[2], count(whole, coactivation=True)
    np.testing.assert_array_equal(total.transitions, together.transitions)
    np.testing.assert_array_equal(total.loads, together.loads)
    np.testing.assert_array_equal(total.coactivation, together.coactivation)
    assert total.num_tokens == together.num_tokens


def test_fitted_and_held_out_counts_add_up(make_trace: MakeTrace, make_batch: Make) -> None:
    trace = make_trace(make_batch(500))
    fit = count(trace, keep=lambda unit_U: fitted(unit_U, seed=3, fraction=0.5))
    held_out = count(trace, keep=lambda unit_U: ~fitted(unit_U, seed=3, fraction=0.5))
    assert fit.num_tokens
    assert held_out.num_tokens
    np.testing.assert_array_equal((fit + held_out).transitions, count(trace).transitions)


def test_counts_of_other_shapes_do_not_add(make_trace: MakeTrace, make_batch: Make) -> None:
    trace = make_trace(make_batch(10))
    with pytest.raises(ValueError, match="counts of shapes"):
        count(trace) + count(trace, coactivation=True)


def test_a_token_whose_first_choice_is_dropped_has_no_top1_transition(make_trace: MakeTrace, make_batch: Make) -> None:
    batch = make_batch(50, dropped=0.0)
    batch.ids[:, 1, 0] = DROPPED
    counts = count(make_trace(batch))
    assert counts.transitions.sum() == 0
    assert counts.loads[1].sum() == 50


def test_weighing_needs_recorded_weights(make_trace: MakeTrace, make_batch: Make) -> None:
    with pytest.raises(UsageError, match="weights were not recorded"):
        count(make_trace(make_batch(10), weights=False), pairs="weighted")


def test_tables_of_an_absurd_size_are_refused_before_they_are_made() -> None:
    model = ModelSpec(name="hostile", layer_ids=tuple(range(4096)), num_experts=65_534, top_k=1)
    with pytest.raises(UsageError, match="GiB"):
        Counter(model)


def test_real_transitions_are_those_of_a_direct_count(gpt_oss: Any, tmp_path: Any) -> None:
    from moeplan.traces.importers import import_trace

    import_trace(gpt_oss, tmp_path / "trace")
    counts = count(open_trace(tmp_path / "trace"))
    with np.load(gpt_oss) as arrays:
        ids = arrays["expert_ids"].astype(np.int64)
    for layer in (0, 11, 22):
        expected = np.zeros((32, 32), np.int64)
        np.add.at(expected, (ids[:, layer, 0], ids[:, layer + 1, 0]), 1)
        np.testing.assert_array_equal(counts.transitions[layer], expected)
    np.testing.assert_array_equal(counts.loads.sum(1), np.full(24, 137_957 * 4))
