"""The layer on four real processes: buffers of fixed capacity, its memory, its laps, and experts that change places."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.runtime.engine.chunks import Chunks
from moeplan.runtime.engine.copies import select_buffers
from moeplan.runtime.engine.layer_placement import Slots
from moeplan.runtime.engine.owners import owners_of
from moeplan.solvers.placement import Placement
from tests.builders import known
from tests.runtime.engine.engine_cases import (
    CASE,
    HIDDEN,
    MICRO,
    MOVING,
    NUM_TOKENS,
    STEPS,
    experts,
    found_by_four,
    in_one_process,
    inputs,
    placements,
)
from tests.runtime.worlds import Alive

every_case = pytest.mark.parametrize("index", range(len(MOVING)), ids=[*MOVING])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_buffers_hold_first_choices_before_second_ones_in_token_order(data: st.DataObject) -> None:
    num_tokens, capacity, pieces = (data.draw(st.integers(low, high)) for low, high in ((0, 12), (0, 6), (1, 3)))
    placement = replace(CASE, seed=data.draw(st.integers(0, 5))).placement()
    slots = Slots.of(placement, 0, torch.device("cpu"))
    rng = np.random.default_rng(num_tokens)
    ids = np.array([rng.choice(8, 2, replace=False) for _ in range(num_tokens)]).reshape(-1, 2)
    device = np.array([[rng.choice(np.flatnonzero(placement.holds(0)[e])) for e in row] for row in ids]).reshape(-1, 2)
    chunks = Chunks.of([1 / pieces] * pieces, [1.0])
    piece = chunks.piece_of(capacity, torch.device("cpu"))
    copies = select_buffers(torch.from_numpy(ids).long(), torch.from_numpy(device).long(), piece, (pieces, 4), slots)
    expected, place = [], Counter[tuple[int, int]]()
    for k in range(2):
        for token in range(num_tokens):
            key = int(ids[token, k]), int(device[token, k])
            if place[key] < capacity:
                expected.append((int(piece[place[key]]), key[1], key[0], token, k))
            place[key] += 1
    rows = torch.stack([copies.place, copies.beside[:, 0], copies.row, known(copies.choice)], dim=1).tolist()
    filled = [(at // 4, at % 4, expert, token, k) for at, expert, token, k in rows if token < num_tokens]
    assert Counter(filled) == Counter(expected)
    assert len(copies.row) == capacity * placement.num_slots
    assert copies.place.tolist() == sorted(copies.place.tolist())
    assert copies.counts.sum().item() == capacity * placement.num_slots
    assert all(expert == -1 for _, expert, token, _ in rows if token == num_tokens)


def test_what_exceeds_the_capacity_is_dropped_whatever_the_degree() -> None:
    capacities = [2 * 2, 2 * 2, 2 * 2, 6]  # K int(F ceil(9 / 8)) rows, to a multiple of both degrees
    for rank, answer in enumerate(found_by_four()):
        for capacity, (y, gradient) in zip(capacities, answer.buffers, strict=True):
            expected, expected_gradient = in_token_order(rank, capacity)
            np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-12, atol=1e-13)


def in_token_order(rank: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """A loop over tokens, first choices first; the rule "even" turns replicas with the token's number."""
    x, ids, weight = inputs(rank)
    if not len(x):
        return x.numpy(), x.numpy()
    x.requires_grad_()
    whole, held, place = experts(), CASE.placement().holds(0), Counter[tuple[int, int]]()
    y = torch.zeros_like(x)
    for k in range(2):
        for token in range(len(x)):
            expert = int(ids[token, k])
            holders = np.flatnonzero(held[expert])
            key = expert, int(holders[token % len(holders)])
            if place[key] < capacity:
                at = slice(token, token + 1)
                alone = whole(x[at], ids[at, k : k + 1], weight[at, k : k + 1])
                y = y.index_add(0, torch.tensor([token]), alone)
            place[key] += 1
    (y * torch.arange(16)).sum().backward()  # type: ignore[no-untyped-call]
    return y.detach().numpy(), known(x.grad).numpy()


def test_buffers_stay_within_one_and_a_half_of_the_plain_all_to_alls() -> None:
    with Alive() as alive:  # sees what is alive at once
        a = torch.zeros(1000)
        b = a + 1
        del a
        b = b * 2
    assert (alive.most, alive.now, len(b)) == (2 * 4000, 4000, 1000)
    plain, *ours = np.moveaxis(np.array([answer.peaks for answer in found_by_four()]), -1, 0)
    assert plain.min() > NUM_TOKENS * HIDDEN * 4
    assert (np.array(ours) <= 1.5 * plain).all()


def test_waiting_for_a_rank_that_comes_late_is_not_counted() -> None:
    assert max(answer.lap_s for answer in found_by_four()) < 0.25


@every_case
def test_outputs_and_training_under_two_placements_in_turn_are_those_of_a_single_process(index: int) -> None:
    case, ranks = [*MOVING.values()][index], [answer.moved[index] for answer in found_by_four()]
    logits, state = in_one_process(case)
    for step, part in itertools.product(range(STEPS), range(MICRO)):
        together = torch.cat([rank.logits[step][part] for rank in ranks])
        torch.testing.assert_close(together, logits[step][part], rtol=1e-9, atol=1e-9)
    assert list(ranks[0].state) == list(state)
    for name, value in state.items():
        torch.testing.assert_close(ranks[0].state[name], value, rtol=1e-9, atol=1e-9)
    assert (logits[0][0] - logits[-1][0]).abs().max() > 1e-3


@every_case
def test_only_experts_that_change_their_owner_travel(index: int) -> None:
    case, ranks = [*MOVING.values()][index], [answer.moved[index] for answer in found_by_four()]
    first, second = placements(case)
    there, back = _new(first, second), _new(second, first)
    turns = [there, *itertools.islice(itertools.cycle([back, there]), STEPS * MICRO - 1)]
    assert [sum(rows) for rows in zip(*(rank.sent for rank in ranks), strict=True)] == turns
    assert there > 0


def _new(old: Placement, new: Placement) -> int:
    owners = [np.stack([owners_of(one.holds(layer)) for layer in range(one.num_layers)]) for one in (old, new)]
    return int((owners[0] != owners[1]).sum())


@every_case
def test_a_move_before_the_backward_pass_is_refused(index: int) -> None:
    for rank in (answer.moved[index] for answer in found_by_four()):
        assert rank.refused.startswith("UsageError: experts moved between a forward and its backward pass")


@every_case
def test_ranks_may_hold_more_and_fewer_experts_after_a_move(index: int) -> None:
    for rank in (answer.moved[index] for answer in found_by_four()):
        torch.testing.assert_close(rank.resized[0], rank.resized[1], rtol=1e-12, atol=1e-12)
