"""Buffers of fixed capacity, against a loop over tokens; and the layer that fills them, on real processes."""

from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.runtime.engine.chunks import Chunks
from moeplan.runtime.engine.copies import Slots, select_buffers
from tests.runtime.engine.engine_cases import CASE, experts, found_by_four, inputs


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
    found = select_buffers(torch.from_numpy(ids).long(), torch.from_numpy(device).long(), piece, (pieces, 4), slots)
    expected, place = [], Counter[tuple[int, int]]()
    for k in range(2):
        for token in range(num_tokens):
            key = int(ids[token, k]), int(device[token, k])
            if place[key] < capacity:
                expected.append((int(piece[place[key]]), key[1], key[0], token, k))
            place[key] += 1
    assert found.choice is not None
    rows = torch.stack([found.place, found.beside[:, 0], found.row, found.choice], dim=1).tolist()
    filled = [(at // 4, at % 4, expert, token, k) for at, expert, token, k in rows if token < num_tokens]
    assert Counter(filled) == Counter(expected)
    assert len(found.row) == capacity * placement.num_slots
    assert found.place.tolist() == sorted(found.place.tolist())
    assert found.counts.sum().item() == capacity * placement.num_slots
    assert all(expert == -1 for _, expert, token, _ in rows if token == num_tokens)


def test_what_exceeds_the_capacity_is_dropped_whatever_the_degree() -> None:
    capacities = [2 * 2, 2 * 2, 2 * 2, 6]  # K int(F ceil(9 / 8)) rows, to a multiple of both degrees
    for rank, found in enumerate(found_by_four()):
        for capacity, (y, gradient) in zip(capacities, found.buffers, strict=True):
            expected, expected_gradient = in_one_process(rank, capacity)
            np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-12, atol=1e-13)


def in_one_process(rank: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
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
    assert x.grad is not None
    return y.detach().numpy(), x.grad.numpy()
