"""`parallelize`: a model whose experts are spread over ranks as a plan says.

Legend: L MoE layers.
"""

import itertools
import os
from typing import Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import MismatchError, UsageError
from ..solvers import contiguous
from ..solvers.arrays import Ints
from ..solvers.cost import inter_ratio
from ..solvers.placement import Placement
from .active import LoadedPlan
from .condensation import Condensation
from .condensation import check as check_condensation
from .decisions import WIRED, DispatchModel
from .dispatch import DISPATCHES
from .dispatch.dispatch import Dispatch
from .engine.chunks import Chunks
from .engine.experts import RoutedBlock, keep_experts, routed_blocks
from .engine.gather import gathered, together
from .engine.layer import ParallelExperts
from .engine.layer_placement import LayerPlacement
from .engine.owners import owners_of
from .engine.watch import watch
from .engine.weights import SharedStacks
from .expert_parallel import ExpertParallelModel
from .gradients import collect_before_steps, leave_out_experts, spread_experts
from .models.checkpoint import fill_model, read_checkpoint
from .plan import Plan
from .rebalancer import Rebalancer
from .rebalancing import Schedule, checked_schedule, tables_of
from .whole import name_held, take_held

Gradients = Literal["mean", "sum"]
ReplicaMemory = Literal["resident", "shared"]


def parallelize(
    model: nn.Module,
    plan: Plan,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    dispatch: DispatchModel | None = None,
    gradients: Gradients = "mean",
    checkpoint: str | os.PathLike[str] | None = None,
    schedule: Schedule | None = None,
    moves_per_step: int | None = None,
    replica_memory: ReplicaMemory = "resident",
) -> ExpertParallelModel:
    """The model with its experts spread over the ranks of `group`; all ranks call it together.

    The model itself is changed: its routed blocks keep their routers and the experts that this rank owns, and the
    memory of the others is freed. Replicas are no parameters: their weights come from the owners. Everything else stays
    as it is, to be replicated or sharded as you like. Move the model to its device before, make optimizers after.

    Parameters
    ----------
    model
        The embedded model, a model of transformers 5, or any with routed blocks alike, the same on all ranks.
    group
        One rank a device of the plan's cluster, or a device mesh of one dimension; None is the default group.
        Experts' gradients are averaged over these ranks: it is to be all that average gradients.
    dispatch
        How tokens travel; None is what the plan says.
    gradients
        Of experts, to which the losses of all ranks contribute: "mean" divides them by the number of ranks, as
        DistributedDataParallel and FSDP do with the gradients of everything else; "sum" does not.
    checkpoint
        A folder of safetensors to load the weights from, of which this rank reads its own experts only; the model may
        then have been made on the device "meta".
    schedule
        For a plan whose replicas follow the load: the tables `[L, D, S]` of experts in slots, -1 in empty ones, by the
        first step that is to run under them, in place of the plan's policy.
    moves_per_step
        For such a plan: how many experts, with their optimizer state, change their owner after one step at most; the
        rest follows after the next steps. Those of one layer move together in any case.
    replica_memory
        Where weights of replicas are: "resident" in every layer, or "shared" by all layers, which takes the memory of
        one. Results are the same to the bit; the weights then travel before each layer's forward and, again, before its
        backward pass.

    Raises
    ------
    MismatchError
        Plan, model and ranks do not belong together; nothing was changed.
    UsageError
        There is no process group, a mesh has several dimensions, the model has no routed blocks, or the dispatch model
        does not go with the plan.
    InputError
        The checkpoint is not this model's, or the schedule breaks a rule of placements.
    """
    if not dist.is_initialized():
        raise UsageError("no process group; call torch.distributed.init_process_group, or start under torchrun")
    group = _group(group)
    watch(group)
    chosen = dispatch or plan.dispatch_model
    with together(group):
        dispatcher = _dispatcher(model, plan, chosen, dist.get_world_size(group))
        _check_rebalancing(plan, schedule, moves_per_step)
        if replica_memory not in get_args(ReplicaMemory):
            raise UsageError(f"replica_memory={replica_memory!r}; expected one of {get_args(ReplicaMemory)}")
    _agree(plan, chosen, replica_memory, group)
    placement, blocks = _placement(plan), routed_blocks(model)
    owner_LE = _owners(plan, placement)
    owned = {
        block.experts_name: np.flatnonzero(owner_E == dist.get_rank(group)).tolist()
        for block, owner_E in zip(blocks, owner_LE, strict=True)
    }
    if checkpoint is not None:
        device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(group) else "cpu"
        with together(group):
            read = read_checkpoint(model, checkpoint, owned, device=device)
        fill_model(model, read, device)
    share = 1 / dist.get_world_size(group) if gradients == "mean" else 1.0
    shared = SharedStacks() if replica_memory == "shared" else None
    for layer, block in enumerate(blocks):
        if checkpoint is None:
            keep_experts(block.experts, owned[block.experts_name])
        device = next(block.experts.parameters()).device
        here = _layer_placement(plan, placement, layer, owner_LE[layer], group, device)
        chunks = Chunks.planned(plan.decisions.pipeline, layer)
        experts = ParallelExperts(block.experts, here, group, chunks=chunks, gradient_share=share, shared=shared)
        experts.wire = plan.decisions.wire
        experts.register_state_dict_post_hook(name_held)  # type: ignore[no-untyped-call]
        experts.register_load_state_dict_pre_hook(take_held)  # type: ignore[no-untyped-call]
        block.module.experts = experts
    for layer_before, layer_after in itertools.pairwise(spread_experts(model).values()):
        layer_before.weights.following = layer_after.weights
    spread = ExpertParallelModel(model, plan, chosen, dispatcher, group)
    for wrapped in (spread, model):
        leave_out_experts(wrapped)
    collect_before_steps(model)
    if plan.decisions.rebalancing is not None:
        spread.rebalancing = Rebalancer(plan, spread.blocks, group, schedule, moves_per_step)
    if plan.decisions.condensation is not None:
        spread.condensation = Condensation(plan.decisions.condensation, spread.blocks, group)
    return spread


def _placement(plan: Plan) -> Placement:
    """The plan's placement, contiguous where it decides none."""
    model = plan.model
    return plan.placement or contiguous.solve(model.num_layers, model.num_experts, plan.cluster).placement


def _owners(plan: Plan, placement: Placement) -> list[Ints]:
    """The owners of each layer's experts `[E]` at the start; where they may move, those that evaluation starts from."""
    from ..solvers.flexmoe.follow import first_homes

    if plan.decisions.rebalancing is None:
        return [owners_of(placement.holds(layer)) for layer in range(placement.num_layers)]
    return [first_homes(table, placement.num_experts) for table in tables_of(placement)]


def _layer_placement(
    plan: Plan,
    placement: Placement,
    layer: int,
    owner_E: Ints,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> LayerPlacement:
    """Placement of a layer's experts, and how a step's tokens choose among their replicas."""
    return LayerPlacement.of(
        placement,
        layer,
        devices_per_node=plan.cluster.devices_per_node,
        far_cost=round(inter_ratio(plan.cluster)),
        group=group,
        device=device,
        owner=owner_E,
        counted=plan.decisions.rebalancing is not None,
    )


def _check_rebalancing(plan: Plan, schedule: Schedule | None, moves_per_step: int | None) -> None:
    """Refuse a schedule that does not go with the plan, and the paper's policy, judged under a split of its own."""
    decision = plan.decisions.rebalancing
    whole = isinstance(moves_per_step, int) and not isinstance(moves_per_step, bool)
    if moves_per_step is not None and (decision is None or not whole or moves_per_step < 1):
        raise UsageError(
            f"moves_per_step={moves_per_step!r}; expected a number, 1 or more, and a plan of solve --strategy flexmoe"
        )
    if schedule is not None and decision is None:
        raise UsageError("a schedule for a plan that decides no rebalancing; give one of solve --strategy flexmoe")
    if schedule is not None:
        checked_schedule(schedule, _placement(plan))
    elif decision is not None and decision.method == "paper":
        raise UsageError(
            "rebalancing by method paper, which splits steps by its own rule, and this runtime exactly; give a plan of"
            " solve --strategy flexmoe without --method"
        )


def _group(given: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group of a device mesh; any other as it is."""
    if not isinstance(given, DeviceMesh):
        return given
    if given.ndim != 1:
        names = given.mesh_dim_names or ()
        taken = f"; name one: group=mesh[{names[-1]!r}]" if names else "; give one with a single dimension"
        raise UsageError(f"a device mesh {list(given.shape)} {list(names)} as group; expected one dimension{taken}")
    return given.get_group()


def _dispatcher(model: nn.Module, plan: Plan, dispatch: DispatchModel, num_ranks: int) -> Dispatch:
    """The dispatch that carries the plan out; raises what keeps this rank from it."""
    if dispatch not in DISPATCHES:
        raise UsageError(f"dispatch model {dispatch!r}; expected one of {tuple(DISPATCHES)}")
    if num_ranks != plan.cluster.num_devices:
        raise MismatchError(
            f"{num_ranks} ranks for a plan of {plan.cluster.num_devices} devices; start one rank a device"
        )
    if mismatch := _mismatch(model, routed_blocks(model), plan):
        raise MismatchError(mismatch)
    check_condensation(plan, dispatch)
    if plan.decisions.wire is not None and dispatch != WIRED:
        raise UsageError(
            f"{plan.decisions.wire} rows beside {dispatch} dispatch, which carries the residual in them; parallelize"
            f" with dispatch={WIRED!r}"
        )
    return DISPATCHES[dispatch].of(plan, plan.folder if isinstance(plan, LoadedPlan) else None)


def _mismatch(model: nn.Module, blocks: list[RoutedBlock], plan: Plan) -> str | None:
    """The first size of the model that is not the plan's, in words; None: there is none."""
    if len(blocks) != plan.model.num_layers:
        return f"the model has {len(blocks)} MoE layers, the plan {plan.model.num_layers}"
    hidden_size = getattr(getattr(model, "config", None), "hidden_size", None)
    for layer, block in enumerate(blocks):
        for what, has, expected in (
            ("experts", block.num_experts, plan.model.num_experts),
            ("experts per token", block.top_k, plan.model.top_k),
            ("hidden elements", hidden_size, plan.model.hidden_size),
        ):
            if None not in (has, expected) and has != expected:
                return f"layer {layer} of the model has {has} {what}, the plan's model {expected}"
    return None


def _agree(plan: Plan, dispatch: str, memory: str, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank that ranks hold different plans, or carry them out otherwise; a collective call."""
    held = gathered((plan.plan_sha256, dispatch, memory), group)
    for rank, here in enumerate(held):
        if here != held[0]:
            theirs, first = (
                f"plan {sha256[:12]}.. in {how}, {where} replicas" for sha256, how, where in (here, held[0])
            )
            raise MismatchError(f"rank {rank} holds {theirs}, rank 0 {first}; start every rank with the same plan")
