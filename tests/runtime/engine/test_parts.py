"""Parts of the engine that need no process group: columns as bytes, kept experts, laps, moves between placements."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from moeplan.planner.demo.model import Experts
from moeplan.profilers.routed import applied
from moeplan.profilers.stopwatch import lap, stopwatch
from moeplan.runtime.engine.experts import keep_experts
from moeplan.runtime.engine.owners import owners_of
from moeplan.runtime.engine.payload import Columns
from moeplan.runtime.engine.rebinding import Moves
from tests.runtime.rank_cases import Case

KINDS = (torch.uint8, torch.bfloat16, torch.float32, torch.int32, torch.float64, torch.int64)


@given(st.integers(0, 5), st.lists(st.tuples(st.integers(1, 9), st.sampled_from(KINDS)), min_size=1, max_size=4))
def test_columns_come_back_as_they_were(num_rows: int, kinds: list[tuple[int, torch.dtype]]) -> None:
    many = [torch.arange(num_rows * width * 3).view(num_rows, 3 * width) % 100 for width, _ in kinds]
    sent = [column.to(dtype)[:, ::3] for column, (_, dtype) in zip(many, kinds, strict=True)]
    columns = Columns.of(*sent)
    rows = columns.pack(*sent)
    assert columns.kinds == tuple(kinds)
    for unpacked, expected in zip(columns.unpack(rows), sent, strict=True):
        assert unpacked.dtype == expected.dtype
        assert torch.equal(unpacked, expected)


def test_there_is_no_more_padding_than_elements_need_to_be_read_where_they_lie() -> None:
    none = torch.zeros(1, 1, dtype=torch.int32).expand(1, 3)[:0]  # whatever its strides
    assert Columns.of(none, torch.zeros(0, 2)).pack(none, torch.zeros(0, 2)).shape == (0, 20)
    x, gates, ids = torch.zeros(2, 5), torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int32)
    assert Columns.of(x, gates, ids).pack(x, gates, ids).shape == (2, 28)
    assert Columns.of(ids, x.double()).pack(ids, x.double()).shape == (2, 48)
    assert Columns.of(x.double(), ids).pack(x.double(), ids).shape == (2, 48)
    assert Columns.of(x.bfloat16(), ids).pack(x.bfloat16(), ids).shape == (2, 16)


def alone(experts: Experts, x: torch.Tensor, expert: int) -> torch.Tensor:
    return functional.linear(functional.silu(functional.linear(x, experts.w_in[expert])), experts.w_out[expert])


def test_kept_experts_compute_what_they_did_and_stay_frozen_and_the_others_are_gone() -> None:
    experts, x = Experts(5, 8, 6).double(), torch.randn(3, 8, dtype=torch.float64)
    before = [alone(experts, x, expert) for expert in (3, 0)]
    keep_experts(experts, [3, 0])
    assert [tuple(p.shape) for p in experts.parameters()] == [(2, 6, 8), (2, 8, 6)]
    assert all(torch.equal(alone(experts, x, slot), before[slot]) for slot in range(2))
    assert experts.w_in.untyped_storage().nbytes() == 2 * 6 * 8 * 8
    assert all(p.requires_grad for p in experts.parameters())
    keep_experts(experts.requires_grad_(False), [1])
    assert not any(p.requires_grad for p in experts.parameters())


class Demanding(torch.nn.Module):
    """Experts that double rows, which must lie close together, in a type of their own."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        assert ids.shape == weight.shape == (len(x), 1)
        return 2 * x.double()


def test_rows_that_lie_in_wider_ones_are_moved_together_and_come_back_in_their_type() -> None:
    wide = torch.arange(12.0).view(3, 4)
    doubled = applied(Demanding(), wide[:, :3], torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    assert doubled.dtype == torch.float32
    assert torch.equal(doubled, 2 * wide[:, :3])


def test_outside_a_stopwatch_a_lap_asks_for_no_process_group_and_costs_microseconds() -> None:
    start = time.perf_counter()
    for _ in range(1000):
        with lap("experts"):
            pass
    assert time.perf_counter() - start < 0.1


def test_a_lap_that_fails_is_not_counted_and_the_stopwatch_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "barrier", lambda: None)
    with pytest.raises(RuntimeError, match="broken"), stopwatch() as laps, lap("combine"):
        raise RuntimeError("broken")
    assert laps == {"dispatch": [], "experts": [], "combine": []}
    with lap("combine"):
        pass
    assert laps["combine"] == []


shapes = st.sampled_from([(2, 2, 2, 2), (3, 3, 3, 3), (1, 4, 0, 5), (8, 0, 8, 1)])
seeds = st.integers(0, 1000)


@given(st.data())
def test_rows_that_travel_put_every_expert_in_the_rows_of_its_new_owner(data: st.DataObject) -> None:
    size, experts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    owners = st.lists(st.integers(0, size - 1), min_size=experts, max_size=experts).map(np.array)
    old, new = data.draw(owners), data.draw(owners)
    moves = [Moves.between(old, new, rank=rank, size=size) for rank in range(size)]
    before = [np.flatnonzero(old == rank).tolist() for rank in range(size)]
    sent = [iter([before[rank][row] for row in moves[rank].sent_rows]) for rank in range(size)]
    arrived = {
        (source, target): [next(sent[source]) for _ in range(moves[source].sent[target])]
        for source in range(size)
        for target in range(size)
    }
    assert sum(map(len, arrived.values())) == (old != new).sum()
    for rank, mine in enumerate(moves):
        assert mine.received == [len(arrived[source, rank]) for source in range(size)]
        rows = before[rank] + [expert for source in range(size) for expert in arrived[source, rank]]
        assert [rows[place] for place in mine.order] == np.flatnonzero(new == rank).tolist()
        assert not arrived[rank, rank]


@given(shapes, seeds, seeds)
def test_every_expert_has_one_owner_among_its_holders_who_stays_where_it_can(
    slots: tuple[int, ...], seed: int, other: int
) -> None:
    case = Case("standard", slots, (1, 1, 1, 1), seed=seed, num_layers=1)
    old, new = (one.placement().holds(0) for one in (case, replace(case, seed=other)))
    before = owners_of(old)
    after, place = owners_of(new, before), np.arange(len(new))
    assert old[place, before].all()
    assert new[place, after].all()
    assert (after == before)[new[place, before]].all()
    assert (owners_of(old, before) == before).all()


def test_owned_experts_are_as_many_on_every_device_as_holders_allow() -> None:
    everywhere = np.ones((8, 4), bool)
    assert np.bincount(owners_of(everywhere)).tolist() == [2, 2, 2, 2]
    everywhere[:3, 1:] = False  # three on the first device only
    assert np.bincount(owners_of(everywhere)).tolist() == [3, 2, 2, 1]
