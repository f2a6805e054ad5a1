"""Moves between two placements of a layer, carried out by hand."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from moeplan.runtime.engine.layer_placement import Slots
from moeplan.runtime.engine.rebinding import Moves
from moeplan.solvers.placement import Placement
from tests.runtime.rank_cases import Case

shapes = st.sampled_from([(2, 2, 2, 2), (3, 3, 3, 3), (1, 4, 0, 5), (8, 0, 8, 1)])
seeds = st.integers(0, 1000)


def moves_of(old: Placement, new: Placement) -> list[Moves]:
    old_slots, new_slots = (Slots.of(one, 0, torch.device("cpu")) for one in (old, new))
    return [Moves.between(old_slots, new_slots, devices_per_node=2, rank=rank, size=4) for rank in range(4)]


@given(shapes, seeds, seeds)
def test_rows_that_travel_put_every_expert_of_the_new_placement_in_its_slot(
    slots: tuple[int, ...], seed: int, other: int
) -> None:
    case = Case("standard", slots, (1, 1, 1, 1), seed=seed, num_layers=1)
    old, new = case.placement(), replace(case, seed=other).placement()
    moves = moves_of(old, new)
    before = [old.held(0, rank) for rank in range(4)]
    sent = [iter([before[rank][slot] for slot in moves[rank].sent_slots]) for rank in range(4)]
    arrived = {
        (source, target): [next(sent[source]) for _ in range(moves[source].sent[target])]
        for source in range(4)
        for target in range(4)
    }
    for rank, mine in enumerate(moves):
        assert mine.received == [len(arrived[source, rank]) for source in range(4)]
        rows = [expert for source in range(4) for expert in arrived[source, rank]]
        held = [*before[rank]]
        for slot, expert in zip(mine.filled_slots, rows, strict=True):
            assert held[slot] != expert
            held[slot] = expert
        assert held == new.held(0, rank)
    for (source, target), experts in arrived.items():
        for expert in experts:
            near = [device for device in range(4) if expert in before[device]]
            assert source == target or expert not in before[target]
            assert source // 2 == target // 2 or all(device // 2 != target // 2 for device in near)


def test_a_placement_that_stays_moves_nothing() -> None:
    placement = Case("standard", (3, 3, 3, 3), (1, 1, 1, 1), num_layers=1).placement()
    assert all(mine == Moves([], [0] * 4, [], [0] * 4) for mine in moves_of(placement, placement))
