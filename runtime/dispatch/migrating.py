"""Migrating dispatch (NetMoE): a layer's combine delivers every sample to the rank of its next attention."""

from pathlib import Path
from typing import NoReturn, Self

import torch.distributed as dist
from torch import Tensor, nn

from ...errors import UsageError
from ..gradients import check_wrapper
from ..migrating.forward import migrating_forward
from ..migrating.guests import Guests
from ..migrating.homes import SamplePolicy
from ..plan import Plan
from .dispatch import Forwarded, view_of_whole

__all__ = ["MigratingDispatch"]


class MigratingDispatch:
    """Samples end on other ranks than they started on; what belongs to them follows.

    Parameters
    ----------
    policy
        What decides the homes of samples.
    """

    def __init__(self, policy: SamplePolicy) -> None:
        self.policy = policy
        self._guests: Guests | None = None

    @classmethod
    def of(cls, plan: Plan, folder: Path | None) -> Self:
        """The dispatch of a plan with a sample policy and no fixed capacity."""
        decided = plan.decisions
        if decided.sample_policy is None:
            raise UsageError(
                f"dispatch model 'migrating' for a plan that decides {' and '.join(decided.names) or 'nothing'};"
                " expected a sample_policy: moeplan solve --strategy netmoe"
            )
        if decided.pipeline is not None and decided.pipeline.capacity_factor is not None:
            raise UsageError(
                "a fixed capacity beside migrating dispatch: what is dropped could not move; take one of them"
            )
        return cls(SamplePolicy.of(plan, folder))

    def forward(
        self,
        model: nn.Module,
        tokens_BS: Tensor,
        sample_B: Tensor,
        mask_BS: Tensor | None,
        group: dist.ProcessGroup | None,
    ) -> Forwarded:
        """Logits `[C, S, V]` of the samples that ended here."""
        check_wrapper(model, group)
        whole = view_of_whole(model, "migrating dispatch")
        done = migrating_forward(whole, self.policy, tokens_BS, sample_B, mask_BS, group)
        self._guests = done.guests
        return Forwarded(done.logits, done.traffic)

    def follow(self, rows: Tensor) -> Tensor:
        """Rows of the samples that the last forward took here, where they ended; a collective call."""
        return rows if self._guests is None else self._guests.follow(rows)

    def generation(self, _group: dist.ProcessGroup | None) -> NoReturn:
        """None: a generation keeps the keys and values of a sample on one rank."""
        raise UsageError(
            "generation with dispatch model 'migrating', which moves samples; parallelize with dispatch='standard' or"
            " 'coherent'"
        )
