"""The model that `parallelize` returns: its forward in each dispatch model.

Legend: B samples of this rank; S positions; T tokens; L MoE layers; V vocabulary.
"""

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import UsageError
from ..traces.schema import RANK_BITS
from .coherent.forward import Coherent, coherent_forward
from .coherent.generation import generate
from .coherent.request import Request
from .coherent.resident import Resident
from .decisions import DispatchModel
from .engine.layer import ParallelExperts
from .engine.routing import RoutedTokens
from .engine.sent import Sent
from .engine.traffic import Traffic
from .gradients import check_ranks, expert_parameters
from .migrating.forward import migrating_forward
from .migrating.guests import Guests
from .migrating.homes import SamplePolicy
from .models.huggingface import view
from .models.protocols import LanguageModel
from .plan import Plan

__all__ = ["ExpertParallelModel"]


class ExpertParallelModel(nn.Module):
    """A model that `parallelize` spread over ranks.

    Attributes
    ----------
    model
        The changed model; under `standard` it may be called itself, wherever the whole one was.
    routed
        What the last forward routed here, one item a layer.
    cache_bytes
        The most bytes of keys and values that this rank held at once, in the last generation or coherent forward;
        without coherence it is those of its own samples, one D-th on average.
    """

    cache_bytes: int
    routed: tuple[RoutedTokens, ...]

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        dispatch: DispatchModel,
        group: dist.ProcessGroup | None,
        policy: SamplePolicy | None = None,
    ) -> None:
        super().__init__()
        self.policy, self._guests = policy, cast("Guests | None", None)
        self.model, self.plan, self.dispatch, self.group = model, plan, dispatch, group
        self._samples: Tensor | None = None
        self._traffic: Traffic | list[Sent] = []  # of the blocks, summed up when asked for
        self.training = model.training
        model.register_forward_pre_hook(self._announce, with_kwargs=True)

    @property
    def traffic(self) -> Traffic:
        """What the last forward, or generation, sent from this rank."""
        found = self._traffic
        return found if isinstance(found, Traffic) else Traffic.total(sent.traffic for sent in found)

    @functools.cached_property
    def blocks(self) -> list[ParallelExperts]:
        """The experts of each MoE layer; never replaced, and to find them takes as long as a layer."""
        return [module for module in self.model.modules() if isinstance(module, ParallelExperts)]

    def forward(self, tokens: Tensor, samples: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits `[B, S, V]` of this rank's tokens, int64 `[B, S]`; all ranks call it together, B may be 0.

        Under `migrating` they are of the samples that ended here: what belongs to samples must `follow` them.

        Parameters
        ----------
        samples
            Global sample ids, int64 `[B]`, by which replicas take turns; None numbers them `rank << 40 | ordinal`.
        mask
            False, or 0, where tokens are padding, `[B, S]`; None: there is none.

        Raises
        ------
        UsageError
            Shapes do not go together, DistributedDataParallel averages over more ranks than share experts, or the
            dispatch model is not for training, or for layers that FSDP2 wraps one by one.
        """
        if samples is None:
            samples = self._numbered(len(tokens), tokens.device)
        if tokens.ndim != 2 or samples.shape != tokens.shape[:1] or (mask is not None and mask.shape != tokens.shape):
            shapes = [list(one.shape) for one in (tokens, samples, mask) if one is not None]
            raise UsageError(f"tokens, samples and mask of shapes {shapes}; expected [B, S], [B] and [B, S]")
        logits = {"standard": self._standard, "coherent": self._coherent, "migrating": self._migrating}[self.dispatch](
            tokens, samples, mask
        )
        self.routed = tuple(block.routed for block in self.blocks)
        return logits

    def follow(self, rows: Tensor) -> Tensor:
        """What belongs to the samples of this rank's last forward, `[B, ...]`, where their logits are.

        Under `migrating` a collective call outside autograd; else they are where they were.
        """
        return rows if self._guests is None else self._guests.follow(rows)

    def generate(
        self,
        prompts: Sequence[Tensor] | Tensor,
        max_new_tokens: int,
        eos: int | None = None,
        samples: Tensor | None = None,
    ) -> list[Tensor]:
        """The most likely continuation of each prompt, int64; all ranks call it together, B may be 0.

        Parameters
        ----------
        prompts
            Tokens of this rank's samples, int64: `[B, S]`, or B of any lengths.
        max_new_tokens, eos
            Where a sample ends, the same on all ranks; `eos` itself is its last token.
        samples
            As in a forward.

        Raises
        ------
        UsageError
            Samples change ranks (`migrating`), the model is in training mode, sharded or of a family that has no view,
            or a rank's request cannot be answered or is not that of the others.
        """
        if self.dispatch == "migrating":
            raise UsageError(
                "generation with dispatch model 'migrating', which moves samples; parallelize with dispatch='standard'"
                " or 'coherent'"
            )
        if self.model.training:
            raise UsageError("generation in training mode, in which models draw noise; call eval() on the model")
        device = next(self.model.parameters()).device
        prompts = [torch.as_tensor(prompt, device=device) for prompt in prompts]
        if samples is None:
            samples = self._numbered(len(prompts), device)
        model = self._view("generation")
        request = Request(
            prompts=prompts,
            samples=samples.to(device),
            max_new_tokens=max_new_tokens,
            eos=eos,
            num_tokens=getattr(model.embed, "num_embeddings", None),
        )
        request.agree(self.group)
        way = Coherent(self.group) if self.dispatch == "coherent" else Resident(self.group)
        found = generate(model, way, request)
        self._traffic, self.cache_bytes = found.traffic, found.cache_bytes
        return found.tokens

    def _standard(self, tokens_BS: Tensor, sample_B: Tensor, mask_BS: Tensor | None) -> Tensor:
        self._samples = sample_B
        output = self.model(tokens_BS) if mask_BS is None else self.model(tokens_BS, attention_mask=mask_BS)
        self._traffic = [block.sent for block in self.blocks]
        return cast("Tensor", getattr(output, "logits", output))

    def _coherent(self, tokens_BS: Tensor, sample_B: Tensor, mask_BS: Tensor | None) -> Tensor:
        if self.model.training and torch.is_grad_enabled():
            raise UsageError(
                "dispatch model 'coherent' in training; it is for inference only: call eval(), or parallelize with"
                " dispatch='standard'"
            )
        found = coherent_forward(self._view("coherent dispatch"), tokens_BS, sample_B, self.group, mask_BS=mask_BS)
        self._traffic, self.cache_bytes = found.traffic, found.cache_bytes
        logits: Tensor = found.logits
        return logits

    def _migrating(self, tokens_BS: Tensor, sample_B: Tensor, mask_BS: Tensor | None) -> Tensor:
        assert self.policy is not None
        self._check_wrapper()
        found = migrating_forward(
            self._view("migrating dispatch"), self.policy, tokens_BS, sample_B, mask_BS, self.group
        )
        self._guests, self._traffic = found.guests, found.traffic
        logits: Tensor = found.logits
        return logits

    def _view(self, how: str) -> LanguageModel:
        """The model in parts, which `how` uses without calling the layers."""
        if any(hasattr(parameter, "full_tensor") for parameter in self.model.parameters()):
            raise UsageError(
                f"{how} of a model of which fully_shard keeps parameters in parts: layers are not called, so that"
                " none would be gathered; fully_shard the whole model only, and make `generate` known by"
                " register_fsdp_forward_method"
            )
        return view(self.model)

    def _check_wrapper(self) -> None:
        """Raise where DistributedDataParallel averages over ranks that have no part in the experts' gradients."""
        wrapper = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
        if wrapper is None or not torch.is_grad_enabled():
            return
        if any(parameter.requires_grad for parameter in expert_parameters(self)):
            check_ranks(dist.get_world_size(wrapper.process_group), self.group)

    def _announce(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the experts which tokens the model is called for, by ids `[B, S]` or embeddings `[B, S, M]`."""
        self._check_wrapper()
        given = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        tokens = next((value for value in given if isinstance(value, Tensor)), None)
        if tokens is None or tokens.ndim < 2:
            return
        batch, length = tokens.shape[:2]
        samples, self._samples = self._samples, None
        if samples is None:
            samples = self._numbered(batch, tokens.device)
        position_T = torch.arange(length, device=tokens.device).repeat(batch)
        for block in self.blocks:
            block.begin(samples.repeat_interleave(length), position_T)

    def _numbered(self, batch: int, device: torch.device) -> Tensor:
        """Sample ids of their own for the samples of this rank."""
        return torch.arange(batch, device=device) + (dist.get_rank(self.group) << RANK_BITS)
