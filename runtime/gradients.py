"""Spread experts in a training loop: their parameters, and the norm of all gradients."""

import weakref
from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import UsageError
from .engine.layer import ParallelExperts

T = TypeVar("T")
Owner = TypeVar("Owner")


def spread_experts(model: nn.Module) -> dict[str, ParallelExperts]:
    """The spread experts of each MoE layer, by their names in `model`."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ParallelExperts)}


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of this rank's experts, which no wrapper may average or shard: `ignored_params` of FSDP."""
    return [parameter for experts in spread_experts(model).values() for parameter in experts.parameters()]


def leave_out_experts(model: nn.Module) -> None:
    """Make a DistributedDataParallel around `model` leave its spread experts alone; `parallelize` did it for its own.

    It is to be called again only for a module of your own that has the parallelized model within.
    """
    names = [
        f"{prefix}.{name}"
        for prefix, experts in spread_experts(model).items()
        for name, _ in (*experts.named_parameters(), *experts.named_buffers())
    ]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]


def put_off(model: nn.Module, waits: bool) -> None:
    """Say whether gradients of replicas wait for a later backward pass than those of the next forwards."""
    for experts in spread_experts(model).values():
        experts.weights.put_off = waits


def collect(model: nn.Module) -> None:
    """Sum the gradients of replicas that were put off to the owners of the experts; a collective call."""
    for experts in spread_experts(model).values():
        experts.weights.collect()


def collect_before_steps(model: nn.Module) -> None:
    """Let no optimizer take a step while gradients of replicas are put off: `collect` before it."""
    at_steps(model, before=lambda there, _: collect(there))


def at_steps(
    owner: Owner,
    *,
    before: Callable[[Owner, Optimizer], object],
    after: Callable[[Owner, Optimizer], object] | None = None,
) -> None:
    """Call functions before and after every step of any optimizer, while their owner lives."""
    here = weakref.ref(owner)

    def hook(function: Callable[[Owner, Optimizer], object]) -> Callable[..., None]:
        """Hook of an optimizer that calls `function` with the owner, while this lives."""

        def at_step(optimizer: Optimizer, *_unused: object) -> None:
            if (there := here()) is not None:
                function(there, optimizer)

        return at_step

    weakref.finalize(owner, register_optimizer_step_pre_hook(hook(before)).remove)
    if after is not None:
        weakref.finalize(owner, register_optimizer_step_post_hook(hook(after)).remove)


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """The norm of all gradients, equal on every rank, once they are scaled to at most `max_norm`; a collective call.

    Each expert counts once, wherever it is and however many replicas it has. What is not an expert must have equal
    gradients on all ranks, or be sharded by FSDP2: call this where `torch.nn.utils.clip_grad_norm_` would be.

    Parameters
    ----------
    max_norm
        Infinity measures only.

    Raises
    ------
    UsageError
        FSDP2 averages over more ranks than share experts.
    """
    collect(model)
    experts = expert_parameters(model)
    ours = set(experts)
    others = [parameter for parameter in model.parameters() if parameter not in ours]
    norm = get_total_norm([parameter.grad for parameter in others if parameter.grad is not None])
    if experts and hasattr(norm, "device_mesh"):
        _check_ranks(norm.device_mesh.size(), next(iter(spread_experts(model).values())).group)
    norm = unsharded(norm)
    if experts:
        norm = (norm.to(experts[0].device).double().square() + _squares(model)).sqrt().to(norm.dtype)
    for part in (others, experts):  # FSDP2's sharded tensors mix with no others
        clip_grads_with_norm_(part, max_norm, norm)
    return norm


def heed_wrapper(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Put gradients of replicas off in a forward of DistributedDataParallel that is under `no_sync`.

    Raises
    ------
    UsageError
        The wrapper averages over more ranks than share experts.
    """
    wrapper = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if wrapper is None or not torch.is_grad_enabled():
        return
    put_off(model, not wrapper.require_backward_grad_sync)
    if any(parameter.requires_grad for parameter in expert_parameters(model)):
        _check_ranks(dist.get_world_size(wrapper.process_group), group)


def unsharded(value: T) -> T:
    """A tensor that FSDP2 keeps in parts, as one; anything else as it is."""
    return cast("T", value.full_tensor()) if hasattr(value, "full_tensor") else value


def _check_ranks(num_averaging: int, group: dist.ProcessGroup | None) -> None:
    """Refuse gradients averaged over more ranks than the group that shares experts: each would train its own."""
    if num_averaging > (size := dist.get_world_size(group)):
        raise UsageError(
            f"gradients averaged over {num_averaging} ranks beside experts trained by a group of {size}, which would"
            " drift from those of other groups; parallelize over all these ranks, or average over the group only"
        )


def _squares(model: nn.Module) -> Tensor:
    """The sum of the squares of all experts' gradients, float64."""
    layers = list(spread_experts(model).values())
    total = torch.zeros((), dtype=torch.float64, device=next(layers[0].parameters()).device)
    for layer in layers:
        for parameter in layer.parameters():
            if parameter.grad is not None:
                total += torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).square()
    dist.all_reduce(total, group=layers[0].group)
    return total
