"""The model that `parallelize` returns: its forward in each dispatch model.

Legend: B samples of this rank; S positions; T tokens; L MoE layers; V vocabulary.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import UsageError
from ..traces.schema import RANK_BITS
from .coherent.generation import Request, generate
from .condensation import Condensation
from .decisions import DispatchModel
from .dispatch.dispatch import Batch, Dispatch, view_of_whole
from .engine.layer import ParallelExperts, RoutedTokens
from .engine.traffic import Sent, Traffic
from .gradients import heed_wrapper, put_off, spread_experts
from .plan import Plan
from .rebalancer import Rebalancer

TOKENS = ("input_ids", "inputs_embeds")  # names by which models take them


class ExpertParallelModel(nn.Module):
    """A model that `parallelize` spread over ranks.

    Attributes
    ----------
    model
        The changed model; under `standard` it may be called itself, wherever the whole one was.
    """

    #: The most bytes of keys and values that this rank held at once, in the last generation or coherent forward;
    #: without coherence it is those of its own samples, one D-th on average
    cache_bytes: int
    routed: tuple[RoutedTokens, ...]  #: What the last forward routed here, one item a layer
    #: What was done for the load of a training; None: the plan's replicas stay where they are
    rebalancing: Rebalancer | None = None
    #: Rows that need not travel; None: all do
    condensation: Condensation | None = None

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        dispatch: DispatchModel,
        dispatcher: Dispatch,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.model, self.plan, self.dispatch, self.group = model, plan, dispatch, group
        self.dispatcher = dispatcher
        self._samples: Tensor | None = None  # those that the next call of the model is about
        self._traffic: Traffic | list[Sent] = []  # of the blocks, summed up when asked for
        self._tokens: Tensor | int = 0  # of the last forward
        self.training = model.training
        model.register_forward_pre_hook(self._announce, with_kwargs=True)

    @property
    def traffic(self) -> Traffic:
        """Traffic of the last forward or generation, from this rank."""
        sent = self._traffic
        return sent if isinstance(sent, Traffic) else Traffic.total(trip.traffic for trip in sent)

    @functools.cached_property
    def blocks(self) -> list[ParallelExperts]:
        """The experts of each MoE layer; never replaced, and to find them takes as long as a layer."""
        return list(spread_experts(self.model).values())

    @property
    def replica_bytes(self) -> int:
        """Bytes of the replicas' weights on this rank: of all layers or, where these share memory, of that."""
        shared = self.blocks[0].weights.shared
        return sum(block.weights.replica_bytes for block in self.blocks) if shared is None else shared.nbytes

    def forward(
        self, tokens: Tensor | None = None, samples: Tensor | None = None, mask: Tensor | None = None, **inputs: Any
    ) -> Any:
        """Logits `[B, S, V]` of this rank's tokens, int64 `[B, S]`; all ranks call it together, B may be 0.

        Under `migrating` they are of the samples that ended here: what belongs to samples must `follow` them. Called
        with `inputs` it returns what the model itself returns.

        Parameters
        ----------
        samples
            Global sample ids, int64 `[B]`, by which replicas take turns; None numbers them `rank << 40 | ordinal`.
        mask
            False, or 0, where tokens are padding, `[B, S]`; None: there is none.
        inputs
            The model's own, such as `input_ids`, `attention_mask` and `labels`, which only `standard` dispatch takes:
            it alone calls the model.

        Raises
        ------
        UsageError
            Shapes do not go together, DistributedDataParallel averages over more ranks than share experts, or the
            dispatch model is not for training, for layers that FSDP2 wraps one by one, or for the model's own inputs.
        """
        if inputs:
            return self._called(tokens, samples, mask, inputs)
        if tokens is None:
            raise UsageError("no tokens; expected model(tokens), int64 [B, S], or the model's own inputs by name")
        if samples is None:
            samples = self._numbered(len(tokens), tokens.device)
        if tokens.ndim != 2 or samples.shape != tokens.shape[:1] or (mask is not None and mask.shape != tokens.shape):
            shapes = [list(given.shape) for given in (tokens, samples, mask) if given is not None]
            raise UsageError(f"tokens, samples and mask of shapes {shapes}; expected [B, S], [B] and [B, S]")
        self._samples = samples
        try:
            done = self.dispatcher.forward(self.model, Batch(tokens, samples, mask), self.group)
        finally:
            self._samples = None
        self._keep(done.traffic)
        self._tokens = done.tokens
        if done.cache_bytes is not None:
            self.cache_bytes = done.cache_bytes
        return done.logits

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Put off sums of replicas' gradients, for all micro-batches of a step but the last.

        DistributedDataParallel's own `no_sync` does so, too. What is put off is summed by the next backward pass
        outside, or before the gradients are clipped or the optimizer takes a step.
        """
        put_off(self.model, True)
        try:
            yield
        finally:
            put_off(self.model, False)

    @property
    def loss_scale(self) -> float:
        """Weight of this rank's mean loss over the tokens of the last forward, so that ranks' mean is that of all
        tokens: this rank's tokens over the mean of all ranks.

        `loss = functional.cross_entropy(logits[mask], labels[mask]) * model.loss_scale` then has the gradients of one
        process that holds all samples, however many tokens each rank has, where ranks' gradients are averaged. A
        collective call.
        """
        here = int(self._tokens)
        every = torch.tensor([here], device=next(self.model.parameters()).device)
        dist.all_reduce(every, group=self.group)
        return here * dist.get_world_size(self.group) / max(int(every), 1)

    def follow(self, rows: Tensor) -> Tensor:
        """Rows that belong to the samples of this rank's last forward, `[B, ...]`, where the logits are.

        Under `migrating` a collective call outside autograd; else they are where they were.
        """
        return self.dispatcher.follow(rows)

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
        way = self.dispatcher.generation(self.group)
        if self.model.training:
            raise UsageError("generation in training mode, in which models draw noise; call eval() on the model")
        device = next(self.model.parameters()).device
        prompts = [torch.as_tensor(prompt, device=device) for prompt in prompts]
        if samples is None:
            samples = self._numbered(len(prompts), device)
        model = view_of_whole(self.model, "generation")
        request = Request(
            prompts=prompts,
            samples=samples.to(device),
            max_new_tokens=max_new_tokens,
            eos=eos,
            num_tokens=getattr(model.embed, "num_embeddings", None),
        )
        request.agree(self.group)
        generated = generate(model, way, request)
        self._traffic, self.cache_bytes = generated.traffic, generated.cache_bytes
        return generated.tokens

    def _called(
        self, tokens: Tensor | None, samples: Tensor | None, mask: Tensor | None, inputs: dict[str, Any]
    ) -> Any:
        """Output of the model for inputs of its own; parameters as of `forward`."""
        if mask is not None:
            raise UsageError(f"mask beside the model's own {', '.join(inputs)}; give it by the model's name for it")
        given = next((one for one in (tokens, *map(inputs.get, TOKENS)) if one is not None), None)
        if samples is not None and (given is None or samples.shape != given.shape[:1]):
            batch = "no tokens" if given is None else f"{len(given)} rows of tokens"
            raise UsageError(f"samples of shape {list(samples.shape)} for {batch}; expected one for each row")
        self._samples = samples
        try:
            output = self.dispatcher.call(self.model, () if tokens is None else (tokens,), inputs)
        finally:
            self._samples = None
        self._keep(None)
        return output

    def _keep(self, traffic: Traffic | None) -> None:
        """Keep what the last forward sent, where None is what the blocks say, and routed."""
        self._traffic = [block.sent for block in self.blocks] if traffic is None else traffic
        self.routed = tuple(block.routed for block in self.blocks)

    def _announce(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the experts which tokens the model is called for, by ids `[B, S]` or embeddings `[B, S, M]`."""
        heed_wrapper(self.model, self.group)
        given = (*args[:1], *map(kwargs.get, TOKENS))
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
