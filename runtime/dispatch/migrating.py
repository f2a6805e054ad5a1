"""Migrating dispatch (NetMoE): a layer's combine delivers every sample to the rank that runs its next attention.

Legend: B samples that started on this rank; S positions, padding included; I samples of all ranks; C samples now here,
ascending; T tokens now here, by sample, then position; K experts per token; M hidden size; D devices; E experts;
V vocabulary.
"""

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import UsageError
from ...profilers.attended import attended
from ...profilers.stopwatch import lap
from ..coherent.contexts import Contexts
from ..engine.gather import Gather
from ..engine.layer import ParallelExperts
from ..engine.traffic import Traffic
from ..engine.uncompiled import uncompiled
from ..gradients import heed_wrapper
from ..migrating.homes import Guests, Homes, SamplePolicy, start_of
from ..models.protocols import LanguageModel, Layer
from ..plan import Plan
from .dispatch import Batch, Forwarded, padded, refuse_inputs, view_of_whole


class MigratingDispatch:
    """Migrating dispatch: samples end on other ranks than they started on, and their data follows.

    Parameters
    ----------
    policy
        Policy that decides the homes of samples.
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

    @uncompiled
    def forward(self, model: nn.Module, batch: Batch, group: dist.ProcessGroup | None) -> Forwarded:
        """Logits `[C, S, V]` of the samples that ended here, differentiable.

        Raises
        ------
        UsageError
            Ranks pad to different lengths.
        """
        heed_wrapper(model, group)
        whole = view_of_whole(model, "migrating dispatch")
        width, real_BS = _common_width(batch, group), batch.real
        contexts = Contexts.gather(batch.samples, real_BS.sum(dim=1), group)
        guests, ordinal = Guests.of(contexts, start_of(self.policy, contexts)), 0
        seed_I = _seeds(whole, batch.samples, contexts)
        token_T, traffic = _started(batch.tokens, real_BS, guests, width)
        x_TM = whole.embed(token_T)
        for depth, layer in enumerate(whole.layers):
            position_T, seeds = contexts.position[guests.token], [seed_I[i] + depth for i in guests.here if seed_I]
            x_TM = x_TM + attended(layer.attention, layer.attention_norm(x_TM), position_T, guests.lengths, seeds)
            if isinstance(getattr(layer.moe, "experts", None), ParallelExperts):
                x_TM, guests, sent = _delivered(layer, ordinal, x_TM, guests, self.policy)
                traffic, ordinal = traffic + sent, ordinal + 1
            else:
                x_TM = x_TM + layer.moe(layer.moe_norm(x_TM))
        self._guests = guests
        padding = contexts.first[-1] < len(guests.home) * width
        real_CS = guests.follow(real_BS) if padding else real_BS.new_ones(len(guests.here), width)
        return Forwarded(padded(whole.head(whole.norm(x_TM)), real_CS), len(guests.token), traffic)

    def call(self, _model: nn.Module, _args: tuple[Any, ...], inputs: Mapping[str, Any]) -> NoReturn:
        """Refuse: the model itself is not called."""
        refuse_inputs(inputs, "migrating dispatch")

    def follow(self, rows: Tensor) -> Tensor:
        """Rows of the samples that the last forward took here, where they ended; a collective call."""
        return rows if self._guests is None else self._guests.follow(rows)

    def generation(self, _group: dist.ProcessGroup | None) -> NoReturn:
        """Refuse: a generation keeps the keys and values of a sample on one rank."""
        raise UsageError(
            "generation with dispatch model 'migrating', which moves samples; parallelize with dispatch='standard' or"
            " 'coherent'"
        )


def _started(tokens_BS: Tensor, real_BS: Tensor, guests: Guests, width: int) -> tuple[Tensor, Traffic]:
    """The tokens of the samples that are here before the first layer, and what was sent to bring them there."""
    if torch.equal(guests.home_on_device, guests.contexts.rank):
        return tokens_BS[real_BS], Traffic()
    rows = [one if len(one) else one.new_zeros(0, width) for one in (tokens_BS, real_BS)]
    tokens_CS, real_CS = (guests.follow(one) for one in rows)
    rank = dist.get_rank(guests.contexts.group)
    leaving = int((guests.home_on_device[guests.contexts.rank == rank] != rank).sum())
    sent_bytes = leaving * width * sum(one.element_size() for one in rows)
    return tokens_CS[real_CS], Traffic(ids_bytes=sent_bytes)


def _delivered(
    layer: Layer, ordinal: int, x_TM: Tensor, guests: Guests, policy: SamplePolicy
) -> tuple[Tensor, Guests, Traffic]:
    """The tokens here after a routed block, whose samples are those, and what was sent."""
    experts, contexts, token_T = layer.moe.experts, guests.contexts, guests.token
    assert isinstance(experts, ParallelExperts)
    experts.begin(contexts.sample[token_T], contexts.position[token_T])
    weight_TK, ids_TK = layer.moe.router(layer.moe_norm(x_TM))
    device_TK = experts.devices(ids_TK)
    homes = None
    if ordinal in policy.layers:
        counts, length_I = _counts(ids_TK, device_TK, experts, guests), np.diff(contexts.first)
        homes = Homes(policy, ordinal, *counts, guests.home, length_I, contexts.group)

    @functools.cache
    def after() -> Guests:
        return guests if homes is None else Guests.of(contexts, homes.result())

    y_nM, token_n = experts.carry(
        x_TM, ids_TK, weight_TK, device_TK, token_T, layer.moe_norm, lambda _first, token: after().home_of(token)
    )
    here = after()
    row_n = torch.searchsorted(here.token, token_n)
    with lap("combine"):
        x_TM = y_nM.new_zeros(len(here.token), x_TM.shape[1]).index_add_(0, row_n, y_nM.contiguous())
    return x_TM, here, experts.traffic + Traffic(ids_bytes=0 if homes is None else homes.sent_bytes)


def _counts(ids_TK: Tensor, device_TK: Tensor, experts: ParallelExperts, guests: Guests) -> tuple[Tensor, Tensor]:
    """The copies of each sample here to every device `[C, D]`, and its pairs with every expert `[C, E]`."""
    size, num_experts = dist.get_world_size(guests.contexts.group), experts.placement.num_experts
    length_C = torch.tensor(guests.lengths, device=ids_TK.device, dtype=torch.int64)
    row_T = torch.arange(len(length_C), device=ids_TK.device).repeat_interleave(length_C, output_size=len(ids_TK))
    visits_TD = ids_TK.new_zeros(len(ids_TK), size).scatter_(1, device_TK, 1)
    copies_CD = ids_TK.new_zeros(len(length_C), size).index_add_(0, row_T, visits_TD)
    cell_TK = row_T[:, None] * num_experts + ids_TK
    pairs_CE = cell_TK.flatten().bincount(minlength=len(length_C) * num_experts)
    return copies_CD, pairs_CE.view(len(length_C), num_experts)


def _seeds(model: LanguageModel, sample_B: Tensor, contexts: Contexts) -> list[int]:
    """Seeds of all samples, `[I]`, each from its id and a number of its first rank's generator; none without need.

    Ranks that were seeded alike give what one process does that holds all samples.
    """
    if not any(layer.attention.dropout for layer in model.layers):
        return []
    drawn = int(torch.randint(2**62, ()))
    keys = (hashlib.sha256(f"{drawn}:{sample}".encode()).digest() for sample in sample_B.tolist())
    seed_B = torch.tensor([int.from_bytes(key[:7]) for key in keys], dtype=torch.int64, device=sample_B.device)
    counts = contexts.rank.bincount(minlength=dist.get_world_size(contexts.group)).tolist()
    seeds: list[int] = Gather.start(counts, contexts.group, seed_B[:, None]).wait()[0].flatten().tolist()
    return seeds


def _common_width(batch: Batch, group: dist.ProcessGroup | None) -> int:
    """S, which all ranks with samples agree on."""
    size, width = batch.tokens.shape
    ends = torch.tensor([width, -width] if size else [0, -(2**31)], device=batch.tokens.device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group)
    most, least = int(ends[0]), -int(ends[1])
    if most > least:
        raise UsageError(f"samples of {least} to {most} positions on different ranks; pad them to one length")
    return most or width
