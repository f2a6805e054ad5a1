"""Local experts: what is kept of them, and rows on their way in and out."""

import torch
from torch.nn import functional

from moeplan.planner.demo.model import Experts
from moeplan.runtime.engine.experts import applied, keep_experts


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


class Demanding(torch.nn.Module):
    """Experts that double rows, which must lie close together."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`[P, M]`, in a type of its own."""
        assert x.is_contiguous()
        assert ids.shape == weight.shape == (len(x), 1)
        return 2 * x.double()


def test_rows_that_lie_in_wider_ones_are_moved_together_and_come_back_in_their_type() -> None:
    wide = torch.arange(12.0).view(3, 4)
    doubled = applied(Demanding(), wide[:, :3], torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    assert doubled.dtype == torch.float32
    assert torch.equal(doubled, 2 * wide[:, :3])
