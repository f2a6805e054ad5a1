"""Condensation of a model that trains: how far copies may be apart, and how that follows the share saved or the loss.

Legend: E experts; D ranks.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MismatchError, UsageError
from .decisions import CondensationDecision, DispatchModel
from .engine.condenser import Condenser
from .engine.gather import all_gather
from .engine.layer import ParallelExperts
from .engine.watch import naming_lost_ranks
from .plan import Plan

NEAREST, FARTHEST = 1e-6, 4.0  # of a reach that follows a share; unit vectors are 2 apart at most, gates sum to 1
MOST_LOSS = 1e30  # beyond it a loss counts as none
LOSS_DIGITS = 20  # binary ones, to which the mean loss is rounded


class Condensation:
    """The plan's condensation, carried out by a model's routed blocks.

    Attributes
    ----------
    tau
        How far a copy may be from the one that stands for it: the error that it may add, or, under `star`, a distance
        sqrt(2 - 2 cosine). None: nothing is condensed before `step` says a loss.
    saved
        Share of the copies for other devices that did not travel, of all ranks, between the last two calls of `step`;
        None: there were none.
    """

    def __init__(
        self, decision: CondensationDecision, blocks: Sequence[ParallelExperts], group: dist.ProcessGroup | None
    ) -> None:
        self.decision, self.group = decision, group
        self.saved: float | None = None
        self._first_loss: float | None = None
        self._condensers = list[Condenser]()
        for layer, block in enumerate(blocks):
            if decision.layers is None or layer in decision.layers:
                device = block.placement.slot_of_expert.device
                gain_E = None if decision.gains is None else torch.tensor(decision.gains[layer], device=device)
                block.condenser = Condenser(cosine=decision.criterion == "star", medoid=decision.medoid, gain_E=gain_E)
                self._condensers.append(block.condenser)
        self._device = blocks[0].placement.slot_of_expert.device
        self.in_eval = False
        self.tau = first_tau(decision)

    @property
    def tau(self) -> float | None:
        """Largest distance of a copy from the one that stands for it."""
        return self._tau

    @tau.setter
    def tau(self, tau: float | None) -> None:
        if tau is not None and math.isnan(tau):
            raise UsageError("tau nan; expected a distance, or None to condense nothing")
        self._tau = tau
        for condenser in self._condensers:
            condenser.reach = tau

    @property
    def in_eval(self) -> bool:
        """True if copies are condensed outside training, too."""
        return self._in_eval

    @in_eval.setter
    def in_eval(self, in_eval: bool) -> None:
        self._in_eval = in_eval
        for condenser in self._condensers:
            condenser.in_eval = in_eval

    @naming_lost_ranks()
    def step(self, loss: Tensor | float) -> None:
        """Follow the schedule after a step of this loss, the mean of this rank's tokens; a collective call.

        All ranks take the same `tau`.
        """
        rows, saved = (sum(getattr(one, name) for one in self._condensers) for name in ("rows", "saved"))
        for condenser in self._condensers:
            condenser.rows = condenser.saved = 0
        loss = float(loss.detach() if isinstance(loss, Tensor) else loss)
        told_3 = torch.tensor([loss, rows, saved], dtype=torch.float64, device=self._device)
        heard_3D = told_3.new_empty(dist.get_world_size(self.group) * 3)
        if (work := all_gather(heard_3D, told_3, self.group)) is not None:
            work.wait()
        losses, rows_D, saved_D = zip(*heard_3D.view(-1, 3).tolist(), strict=True)
        self.saved = sum(saved_D) / sum(rows_D) if sum(rows_D) else None
        known = [one for one in losses if abs(one) < MOST_LOSS]  # a rank without tokens has none
        self._follow(round(sum(known) / len(known) * 2**LOSS_DIGITS) / 2**LOSS_DIGITS if known else None)

    def state_dict(self) -> dict[str, float | None]:
        """State between two steps, from which the schedule goes on as it would have; the same on all ranks."""
        return {"tau": self.tau, "first_loss": self._first_loss}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Go on from a state; MismatchError where it is not one."""
        if lacking := {"tau", "first_loss"} - set(state):
            raise MismatchError(f"a state of condensation without {min(lacking)}; expected one of state_dict()")
        self.tau, self._first_loss = state["tau"], state["first_loss"]

    def _follow(self, loss: float | None) -> None:
        self._first_loss = self._first_loss or loss
        self.tau = next_tau(self.decision, self.tau, self.saved, loss, self._first_loss)


def first_tau(decision: CondensationDecision) -> float | None:
    """Largest distance of a copy from the one that stands for it, before a loss is known."""
    return decision.tau if decision.threshold is None else distance(decision.threshold)


def next_tau(
    decision: CondensationDecision,
    tau: float | None,
    saved: float | None,
    loss: float | None,
    first_loss: float | None,
) -> float | None:
    """Largest distance after a step of this loss that saved this share of copies (None: not known, there were none).

    A held share that cannot be reached moves no further than `NEAREST` and `FARTHEST`.
    """
    if decision.schedule == "share" and saved is not None and tau is not None:
        assert decision.target is not None
        most = max((gain for gains in decision.gains or () for gain in gains), default=1.0)
        return max(min(tau * math.exp(decision.target - saved), FARTHEST * most), NEAREST)
    if decision.schedule == "paper" and loss is not None and first_loss is not None:
        assert decision.h_max is not None
        decrease = (first_loss - loss) / first_loss if first_loss else 0.0
        return distance(2 * decision.h_max / (1 + math.exp(min(decision.kappa * decrease, 700))))
    return tau


def distance(cosine: float) -> float:
    """The distance of two directions, sqrt(2 - 2 cosine)."""
    return math.sqrt(2 - 2 * min(max(cosine, -1.0), 1.0))


def check(plan: Plan, dispatch: DispatchModel) -> None:
    """Refuse a plan whose condensation cannot be carried out beside its other decisions.

    Raises
    ------
    UsageError
        The dispatch model lets tokens live elsewhere, or similarities are guessed from the layer before.
    """
    decision = plan.decisions.condensation
    if decision is None:
        return
    if dispatch not in decision.dispatch_models:
        raise UsageError(
            f"condensation beside {dispatch} dispatch, under which tokens do not return; parallelize with"
            " dispatch='standard'"
        )
    if decision.s1 is not None:
        raise UsageError(
            "condensation by the similarities of the layer before (s1, s2): the runtime computes every layer's own;"
            " leave them out"
        )
