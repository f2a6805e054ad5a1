"""`parallelize`: a model whose experts are spread over ranks as a plan says.

Legend: B samples of this rank; S positions; T tokens; L MoE layers; V vocabulary.
"""

from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import MismatchError, MoeplanError, UsageError
from ..traces.schema import RANK_BITS
from .coherent import coherent_forward
from .layer import ExpertParallelMoE
from .model import LanguageModel
from .plan import Plan
from .routing import RoutedTokens
from .traffic import Traffic

__all__ = ["ExpertParallelModel", "parallelize"]

Dispatch = Literal["standard", "coherent"]


def parallelize(
    model: nn.Module, plan: Plan, group: dist.ProcessGroup | None = None, *, dispatch: Dispatch | None = None
) -> "ExpertParallelModel":
    """The model with its experts spread over the ranks of `group`; all ranks call it together.

    The model itself is changed: its MoE blocks keep their routers and this rank's experts, and the memory of the
    others is freed. Everything else stays as it is. Move the model to its device before, make optimizers after.

    Parameters
    ----------
    model
        Of the shape of `runtime.model.LanguageModel`, the same on all ranks.
    group
        One rank a device of the plan's cluster; None is the default group.
    dispatch
        How tokens travel; None is what the plan says.

    Raises
    ------
    MismatchError
        Plan, model and ranks do not belong together; nothing was changed.
    UsageError
        There is no process group, the model has another shape, or the dispatch model is not one of these two.
    """
    if not dist.is_initialized():
        raise UsageError("no process group; call torch.distributed.init_process_group, or start under torchrun")
    chosen = cast("Dispatch", dispatch or plan.dispatch_model)
    _agree(plan, chosen, _problem(model, plan, chosen, dist.get_world_size(group)), group)
    placement, cluster = plan.placement, plan.cluster
    assert placement is not None
    for ordinal, layer in enumerate(cast("LanguageModel", model).layers):
        layer.moe = ExpertParallelMoE(
            layer.moe, placement, ordinal, devices_per_node=cluster.devices_per_node, group=group
        )
    return ExpertParallelModel(model, chosen, group, has_replicas=placement.has_replicas)


class ExpertParallelModel(nn.Module):
    """A model that `parallelize` spread over ranks.

    Attributes
    ----------
    traffic, routed
        What the last forward sent from this rank, and what it routed here, one item a layer.
    """

    traffic: Traffic
    routed: tuple[RoutedTokens, ...]

    def __init__(
        self, model: nn.Module, dispatch: Dispatch, group: dist.ProcessGroup | None, *, has_replicas: bool
    ) -> None:
        super().__init__()
        self.model, self.dispatch, self.group, self.has_replicas = model, dispatch, group, has_replicas

    def forward(self, tokens: Tensor, samples: Tensor | None = None) -> Tensor:
        """Logits `[B, S, V]` of this rank's tokens, int64 `[B, S]`; all ranks call it together, B may be 0.

        Parameters
        ----------
        samples
            Global sample ids, int64 `[B]`, by which replicas take turns; None numbers them `rank << 40 | ordinal`.
        """
        if samples is None:
            samples = torch.arange(len(tokens), device=tokens.device) + (dist.get_rank(self.group) << RANK_BITS)
        if self.training and torch.is_grad_enabled():
            self._refuse_training()
        if self.dispatch == "coherent":
            return self._coherent(tokens, samples)
        return self._standard(tokens, samples)

    def _refuse_training(self) -> None:
        """Raise where training would not give what one process gives."""
        if self.dispatch == "coherent":
            raise UsageError(
                "dispatch model 'coherent' in training; it is for inference only: call eval(), or parallelize with"
                " dispatch='standard'"
            )
        if self.has_replicas:
            raise UsageError(
                "training under a placement with replicas, whose weights would drift apart: their gradients are not"
                " summed; call eval(), or solve with one slot an expert"
            )

    def _coherent(self, tokens_BS: Tensor, sample_B: Tensor) -> Tensor:
        model = cast("LanguageModel", self.model)
        logits_BSV, self.traffic = coherent_forward(model, tokens_BS, sample_B, self.group)
        self.routed = tuple(moe.routed for moe in self._blocks())
        return logits_BSV

    def _standard(self, tokens_BS: Tensor, sample_B: Tensor) -> Tensor:
        batch, length = tokens_BS.shape
        position_T = torch.arange(length, device=tokens_BS.device).repeat(batch)
        for moe in self._blocks():
            moe.begin(sample_B.repeat_interleave(length), position_T)
        logits_BSV: Tensor = self.model(tokens_BS)
        self.traffic = Traffic.total(moe.traffic for moe in self._blocks())
        self.routed = tuple(moe.routed for moe in self._blocks())
        return logits_BSV

    def _blocks(self) -> list[ExpertParallelMoE]:
        return [cast("ExpertParallelMoE", layer.moe) for layer in cast("LanguageModel", self.model).layers]


def _problem(model: nn.Module, plan: Plan, dispatch: str, num_ranks: int) -> MoeplanError | None:
    """What keeps this rank from carrying the plan out, None when nothing does."""
    if dispatch not in ("standard", "coherent"):
        return UsageError(f"dispatch model {dispatch!r}; the runtime carries out standard and coherent")
    if unsupported := [name for name in plan.decisions.names if name != "placement"]:
        return UsageError(
            f"the plan decides {' and '.join(unsupported)}, which the runtime does not carry out; give a plan that"
            " decides a placement only"
        )
    if plan.placement is None:
        return MismatchError("the plan decides no placement; solve one with moeplan solve --strategy exflow")
    if num_ranks != plan.cluster.num_devices:
        return MismatchError(
            f"{num_ranks} ranks for a plan of {plan.cluster.num_devices} devices; start one rank a device"
        )
    try:
        mismatch = _mismatch(cast("LanguageModel", model), plan)
    except AttributeError as error:
        return UsageError(
            f"{type(model).__name__} is no model that can be parallelized ({error}); expected the shape of"
            " moeplan.runtime.model.LanguageModel, not parallelized before"
        )
    return None if mismatch is None else MismatchError(mismatch)


def _mismatch(model: LanguageModel, plan: Plan) -> str | None:
    """Where the model's sizes are not the plan's."""
    layers = model.layers
    if len(layers) != plan.model.num_layers:
        return f"the model has {len(layers)} MoE layers, the plan {plan.model.num_layers}"
    for ordinal, layer in enumerate(layers):
        num_experts, _, hidden_size = layer.moe.experts.w_in.shape
        for what, found, expected in (
            ("experts", num_experts, plan.model.num_experts),
            ("experts a token", layer.moe.router.top_k, plan.model.top_k),
            ("hidden elements", hidden_size, plan.model.hidden_size),
        ):
            if expected not in (None, found):
                return f"layer {ordinal} of the model has {found} {what}, the plan's model {expected}"
    return None


def _agree(plan: Plan, dispatch: str, problem: MoeplanError | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank what any rank found wrong, or that ranks hold different plans; a collective call."""
    statements: list[tuple[str, str, MoeplanError | None]] = [("", "", None)] * dist.get_world_size(group)
    dist.all_gather_object(statements, (plan.plan_sha256, dispatch, problem), group=group)
    for rank, (sha256, how, found) in enumerate(statements):
        if found is not None:
            raise type(found)(f"rank {rank}: {found}")
        if (sha256, how) != statements[0][:2]:
            raise MismatchError(
                f"rank {rank} holds plan {sha256[:12]}.. in {how}, rank 0 plan {statements[0][0][:12]}.. in"
                f" {statements[0][1]}; start every rank with the same plan"
            )
