"""Waits in the place of computation: ranks outnumber cores here, and their real products would wait for one another.

What oversleeps is taken off the next wait, so that waits are exact on average.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

LEAST_S = 50e-6  # less is owed until there is more
CARRIED_S = 2e-3  # the most that a wait is shortened by
BACKWARD = 2.0  # times as long as forward


class Waiter:
    """The clock of a rank's emulated computation."""

    def __init__(self) -> None:
        self.owed_s = 0.0

    def wait(self, seconds: float) -> None:
        """Pass the time that this takes."""
        self.owed_s += seconds
        if self.owed_s > LEAST_S:
            started = time.perf_counter()
            time.sleep(self.owed_s)
            self.owed_s = max(self.owed_s - (time.perf_counter() - started), -CARRIED_S)


class WaitingExperts(nn.Module):
    """Experts that take `start_s + pair_s` a token-expert pair, forward, twice that backward, and add nothing."""

    def __init__(self, num_experts: int, waiter: Waiter, start_s: float, pair_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_experts, 1, 1))
        self.waiter, self.start_s, self.pair_s = waiter, start_s, pair_s

    def forward(self, x_TM: Tensor, ids_TK: Tensor, _weight_TK: Tensor) -> Tensor:
        """Zeros `[T, M]`, some time later."""
        seconds = self.start_s + self.pair_s * ids_TK.numel()
        y_TM: Tensor = _Waited.apply(x_TM, self.waiter, seconds)  # type: ignore[no-untyped-call]
        return y_TM


class _Waited(torch.autograd.Function):
    """Zeros after a wait; backward too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, waiter: Waiter, seconds: float) -> Tensor:
        ctx.waiter, ctx.seconds = waiter, seconds
        waiter.wait(seconds)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.waiter.wait(BACKWARD * ctx.seconds)
        return torch.zeros_like(grads[0]), None, None
