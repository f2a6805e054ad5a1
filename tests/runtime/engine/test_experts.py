"""Local experts and their partial sums."""

import torch
from torch.nn import functional

from moeplan.planner.demo.model import Experts
from moeplan.runtime.engine.experts import applied, keep_experts, partial_sums


def alone(experts: Experts, x: torch.Tensor, expert: int) -> torch.Tensor:
    return functional.linear(functional.silu(functional.linear(x, experts.w_in[expert])), experts.w_out[expert])


def test_kept_experts_compute_what_they_did_and_the_others_are_gone() -> None:
    experts, x = Experts(5, 8, 6).double(), torch.randn(3, 8, dtype=torch.float64)
    before = [alone(experts, x, expert) for expert in (3, 0)]
    keep_experts(experts, [3, 0])
    assert [tuple(p.shape) for p in experts.parameters()] == [(2, 6, 8), (2, 8, 6)]
    assert all(torch.equal(alone(experts, x, slot), before[slot]) for slot in range(2))
    assert experts.w_in.untyped_storage().nbytes() == 2 * 6 * 8 * 8


def test_kept_experts_stay_frozen() -> None:
    experts = Experts(4, 8, 6).requires_grad_(False)
    keep_experts(experts, [1])
    assert not any(p.requires_grad for p in experts.parameters())


def test_partial_sums_equal_a_loop_over_tokens_and_experts() -> None:
    experts = Experts(3, 8, 6).double()
    x, weight = torch.randn(7, 8, dtype=torch.float64), torch.rand(7, 4, dtype=torch.float64)
    slot = torch.randint(-1, 2, (7, 4))  # expert 2 gets nothing
    expected = torch.zeros_like(x)
    for token in range(7):
        for k in range(4):
            if slot[token, k] >= 0:
                expected[token] += weight[token, k] * alone(experts, x[token : token + 1], int(slot[token, k]))[0]
    assert torch.allclose(partial_sums(experts, x, slot, weight)[0], expected, rtol=1e-13, atol=1e-13)


def test_without_experts_or_tokens_partial_sums_are_zero() -> None:
    experts, x = Experts(3, 8, 6), torch.randn(2, 8)
    nowhere = torch.full((2, 1), -1)
    keep_experts(experts, [])
    assert torch.equal(partial_sums(experts, x, nowhere, torch.ones(2, 1))[0], torch.zeros(2, 8))
    assert partial_sums(experts, x[:0], nowhere[:0], torch.ones(0, 1))[0].shape == (0, 8)


class Demanding(torch.nn.Module):
    """Experts that double rows, which must lie close together."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`[P, M]`, in a type of its own."""
        assert x.is_contiguous()
        assert ids.shape == weight.shape == (len(x), 1)
        return 2 * x.double()


def test_rows_that_lie_in_wider_ones_are_moved_together_and_come_back_in_their_type() -> None:
    wide = torch.arange(12.0).view(3, 4)
    found = applied(Demanding(), wide[:, :3], torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    assert found.dtype == torch.float32
    assert torch.equal(found, 2 * wide[:, :3])
