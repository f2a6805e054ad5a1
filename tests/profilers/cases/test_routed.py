"""The cases of what the runtime runs: unequal loads, the block's sums by a naive twin, and exchanges on real ranks."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeplan.profilers.cases import CASES
from moeplan.profilers.cases.routed_exchange import ROW_BYTES, copies_DD, ways
from moeplan.profilers.cases.routing import pairs_DE, popularity_DE
from moeplan.profilers.routed import grouped, looped, partial_sums, weighted_experts
from moeplan.profilers.world import World, run_world
from tests.builders import known

BLOCK = {"tokens": 60, "experts": 3, "hidden": 16, "ffn": 8}


@given(ranks=st.integers(1, 9), experts=st.integers(1, 9), busiest=st.integers(1, 5000))
def test_the_busiest_rank_has_what_is_asked_and_popular_experts_have_more(
    ranks: int, experts: int, busiest: int
) -> None:
    pairs = pairs_DE(ranks, experts, busiest)
    assert pairs.sum(axis=1).max() == busiest
    expected = popularity_DE(ranks, experts) / popularity_DE(ranks, experts).sum(axis=1).max() * busiest
    assert (np.abs(pairs - expected) <= 1.001).all()


def test_ranks_are_as_unequal_as_routing_makes_them() -> None:
    load_D = popularity_DE(4, 4).sum(axis=1)
    assert 1.1 < load_D.max() / load_D.mean() < 1.6


def naive(block: Any) -> torch.Tensor:
    """The sums of a block, row by row and choice by choice."""
    total = torch.zeros(block.x.shape, dtype=torch.float64)
    for row, (x, slots, weights) in enumerate(zip(block.x.double(), block.slot, block.weight.double(), strict=True)):
        for slot, weight in zip(slots.tolist(), weights, strict=True):
            if slot >= 0:
                gate, up = (block.w_in[slot].double() @ x).chunk(2)
                total[row] += weight * (block.w_out[slot].double() @ (torch.nn.functional.silu(gate) * up))
    return total


def test_a_block_gives_the_weighted_sums_of_a_naive_twin_of_rows_that_lie_in_wider_ones() -> None:
    case, world = CASES["routed_block"], World(2, 4, "cpu", ("host",) * 4, print)
    block = case.prepare(BLOCK, "fp32", world)
    assert block.x.stride(0) > block.x.shape[1]
    assert ((block.slot >= 0).sum(dim=1) == 1).all()
    assert (
        block.slot.flatten()[block.slot.flatten() >= 0].bincount(minlength=3).tolist() == pairs_DE(4, 3, 60)[2].tolist()
    )
    torch.testing.assert_close(case.run(block), naive(block).float())
    wrong = case.run(block)
    wrong[(block.slot == 1).any(dim=1).nonzero()[-1]] += 0.1
    assert str(case.check(block, wrong, world)).startswith("expert 1 off by")


@pytest.mark.parametrize("gated", [True, False])
def test_experts_of_several_choices_add_up_and_gates_are_above_their_ups(gated: bool) -> None:
    torch.manual_seed(0)
    x, weight, ids = torch.randn(9, 6), torch.rand(9, 2), torch.randint(4, (9, 2))
    w_in, w_out = torch.randn(4, 10 if gated else 5, 6), torch.randn(4, 6, 5)
    expected = torch.zeros_like(x)
    for row in range(9):
        for choice in range(2):
            expert = int(ids[row, choice])
            inner = w_in[expert] @ x[row]
            inner = torch.nn.functional.silu(inner[:5]) * (inner[5:] if gated else 1)
            expected[row] += weight[row, choice] * (w_out[expert] @ inner)
    torch.testing.assert_close(weighted_experts(x, ids, weight, w_in, w_out), expected)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="torch before 2.10 has no grouped product")
@pytest.mark.parametrize("gated", [True, False])
def test_a_grouped_product_gives_the_outputs_and_gradients_of_one_expert_after_another(gated: bool) -> None:
    torch.manual_seed(0)
    end_E = torch.tensor([3, 3, 8, 9], dtype=torch.int32)  # nobody asks the second
    tensors = torch.randn(9, 16), torch.randn(4, 16 if gated else 8, 16), torch.randn(4, 16, 8)
    upstream, found = torch.randn(9, 16), []
    for products in (grouped, looped):
        x, w_in, w_out = (tensor.clone().requires_grad_() for tensor in tensors)
        y = products(x, end_E, w_in, w_out)
        found.append((y, *torch.autograd.grad(y, (x, w_in, w_out), upstream)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_rows_that_ask_nobody_here_get_zeros_and_are_no_pairs() -> None:
    def experts(x: torch.Tensor, _slot: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight

    slots = torch.tensor([[0, -1], [-1, -1], [1, 0]])
    total, pairs = partial_sums(experts, torch.ones(3, 2), slots, torch.full((3, 2), 2.0))
    assert (total.tolist(), pairs) == ([[2, 2], [0, 0], [4, 4]], 3)


@given(ranks=st.integers(2, 9), rows=st.integers(100, 100_000), kept=st.integers(0, 90), even=st.booleans())
def test_the_busiest_rank_of_an_exchange_handles_the_bytes_asked_for_and_each_keeps_its_part(
    ranks: int, rows: int, kept: int, even: bool
) -> None:
    copies = copies_DD(rows * ROW_BYTES, kept, ranks, even=even)
    own, handled = np.diag(copies), np.maximum(copies.sum(axis=0), copies.sum(axis=1))
    assert handled.max() == pytest.approx(rows, abs=ranks)
    assert own == pytest.approx(handled * kept / 100, abs=ranks)
    spread = np.ptp(copies[~np.eye(ranks, dtype=bool)])
    assert spread == 0 if even else spread > 0 or rows * (100 - kept) < 1000 * ranks


def test_as_many_as_of_even_copies_are_kept_or_more() -> None:
    uneven = [{"moves": moves, "kept": kept, "even": 0} for kept in (62, 25) for moves in (0, 1)]
    assert ways(4) == [*uneven, {"moves": 0, "kept": 25, "even": 1}]
    assert CASES["routed_exchange"].work({"bytes": 1000, "moves": 0, "kept": 25, "even": 0}, 4) == 1500


def exchanged(world: World, _payload: None) -> list[tuple[str | None, list[str | None]]]:
    """What a rank's check says of right answers, and of wrong ones, of both kinds of exchange."""
    case, found = CASES["routed_exchange"], list[tuple[str | None, list[str | None]]]()
    for way in ways(world.size):
        inputs = case.prepare({"bytes": 8192, **way}, "uint8", world)
        case.run(inputs)
        arrived, total = case.run(inputs)
        elsewhere, more = arrived.clone(), total.clone()
        elsewhere[0, -1] += 1
        more[-1, -1] += 1
        wrong = ((elsewhere, total), (arrived.roll(1, 0), total), (arrived, more), (arrived, torch.zeros_like(total)))
        found.append((case.check(inputs, (arrived, total), world), [case.check(inputs, one, world) for one in wrong]))
    return found


def test_exchanges_deliver_every_row_and_sum_and_wrong_ones_are_told() -> None:
    for rank in known(run_world(3, exchanged)):
        for right, wrong in rank:
            assert right is None
            assert all(wrong)
            assert str(wrong[0]).startswith("1 of ")
            assert str(wrong[2]).startswith("1 of ")
