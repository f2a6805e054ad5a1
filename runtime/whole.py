"""The whole of a parallelized model, under the names that it had: what its checkpoints hold, saved and loaded.

Legend: E experts; O experts that this rank owns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import MismatchError
from ..solvers.arrays import Ints
from .engine.gather import gathered
from .engine.layer import ParallelExperts
from .expert_parallel import ExpertParallelModel
from .gradients import spread_experts, unsharded

LOCAL = "local."  # what `ParallelExperts` has between its name and that of a stacked parameter
MOST_NAMED = 8
HELD = "held"  # whose rows those are, in the state dict of one rank


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The `state_dict()` that the model would have without `parallelize`, on rank 0 on the CPU; empty on the others.

    A collective call. Experts come one by one, so that rank 0 needs room for the whole model and one expert beside it;
    what FSDP2 shards is put together.

    Parameters
    ----------
    model
        Parallelized, wrapped or not.
    """
    model = _bare(model)
    layers = spread_experts(model)
    owners = _Owners.of(layers)
    state = {}
    for key, value in model.state_dict().items():
        if key.removesuffix(f".{HELD}") in layers:
            continue
        layer = next((name for name in layers if key.startswith(f"{name}.{LOCAL}")), None)
        whole = unsharded(value) if layer is None else owners.gather(layer, value)
        if whole is not None and owners.rank == 0:
            state[key if layer is None else f"{layer}.{key.removeprefix(f'{layer}.{LOCAL}')}"] = whole.cpu()
    return state


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` as it would be without `parallelize`, on rank 0; empty on others. A collective call."""
    layers = spread_experts(_bare(model))
    owners, written = _Owners.of(layers), optimizer.state_dict()
    layer_of = {parameter: name for name, layer in layers.items() for parameter in layer.parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        state = written["state"].get(index, {})
        if parameter in layer_of:
            state = owners.gather_state(layer_of[parameter], parameter, state)
        written["state"] |= {index: {name: unsharded(value) for name, value in state.items()}} if state else {}
    return written if owners.rank == 0 else {}


def keep_held(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Cut the state of an optimizer that `load_state_dict` gave a whole one down to the experts of this rank."""
    for layer in spread_experts(_bare(model)).values():
        for parameter in layer.parameters():
            state = optimizer.state.get(parameter, {})
            state |= {name: value[layer.owned] for name, value in state.items() if _is_stacked(value, parameter)}


def name_held(layer: nn.Module, state: dict[str, Any], prefix: str, *_unused: Any) -> None:
    """Add to a layer's state dict the experts whose rows this rank has."""
    assert isinstance(layer, ParallelExperts)
    state[prefix + HELD] = torch.tensor(layer.owned, dtype=torch.int64)


def take_held(layer: ParallelExperts, state: dict[str, Any], prefix: str, *_unused: Any) -> None:
    """Cut the whole stacked weights of a layer in a state dict that is loaded down to the experts of this rank.

    Raises
    ------
    MismatchError
        The state is of another rank, or under another placement.
    """
    held = state.pop(prefix + HELD, None)
    if held is not None and held.tolist() != layer.owned:
        raise MismatchError(
            f"{prefix.removesuffix('.')}: the state is of experts {_few(held.long().tolist())}, this rank owns"
            f" {_few(layer.owned)}; it was saved by another rank or under another plan: load it there, or save"
            " full_state_dict(model)"
        )
    for name, _ in layer.local.named_parameters():
        if prefix + name in state:
            state[f"{prefix}{LOCAL}{name}"] = state.pop(prefix + name)[layer.owned]


@dataclass(frozen=True, slots=True)
class _Owners:
    """The owner of each expert, int64 `[E]`, by the name of the layer."""

    owner: Mapping[str, Ints]
    rank: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, layers: Mapping[str, ParallelExperts]) -> "_Owners":
        group = next(iter(layers.values())).group
        return cls({name: layer.placement.owner for name, layer in layers.items()}, dist.get_rank(group), group)

    def gather(self, layer: str, rows: Tensor) -> Tensor | None:
        """The rows of all experts, in their order, `[E, ...]` on rank 0's CPU, from this rank's `[O, ...]`."""
        owner_E, own = self.owner[layer], iter(rows)
        whole = rows.new_empty(len(owner_E), *rows.shape[1:], device="cpu") if self.rank == 0 else None
        for expert, device in enumerate(owner_E.tolist()):
            if self.rank not in (0, device):
                continue
            row = next(own).contiguous() if device == self.rank else rows.new_empty(rows.shape[1:])
            if whole is None:
                dist.send(row, group=self.group, group_dst=0)
                continue
            if device != 0:
                dist.recv(row, group=self.group, group_src=device)
            whole[expert] = row
        return whole

    def gather_state(self, layer: str, parameter: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's state of all experts of a stacked parameter; a device without experts may have none."""
        stacked = {name for name, value in state.items() if _is_stacked(value, parameter)}
        mine = {name: value.dtype if name in stacked else value for name, value in state.items()}
        whole: dict[str, Any] = {}
        for theirs in reversed(gathered(mine, self.group)):
            whole |= theirs
        for name, value in whole.items():
            if isinstance(value, torch.dtype):
                rows = state[name] if name in stacked else parameter.new_empty(parameter.shape, dtype=value)
                whole[name] = self.gather(layer, rows)
        return whole


def _few(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:MOST_NAMED])) + ", ..." * (len(ids) > MOST_NAMED) if ids else "none"


def _is_stacked(value: object, parameter: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape[1:] == parameter.shape[1:] and value.ndim == parameter.ndim


def _bare(model: nn.Module) -> nn.Module:
    """The model within DistributedDataParallel, torch.compile and what `parallelize` returned."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(model, ExpertParallelModel):
            model = model.model
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
