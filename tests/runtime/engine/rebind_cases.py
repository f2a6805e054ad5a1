"""What four ranks find of experts that change places between steps, and the single process they are held against."""

from dataclasses import dataclass, replace
from unittest import mock

import torch
import torch._dynamo  # optimizers load it, each rank for itself where its nursery has not
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.engine.layer_placement import LayerPlacement
from moeplan.runtime.engine.route import Route
from moeplan.runtime.expert_parallel import ExpertParallelModel
from moeplan.runtime.whole import full_state_dict
from moeplan.solvers.placement import Placement
from tests.runtime.rank_cases import Case
from tests.runtime.worlds import own, refusal_of

CASES = {
    "in chunks": Case(
        "standard", (2, 2, 2, 2), (2, 3, 1, 2), forward=(2, 3, 1), backward=(1, 2, 4), gradients=True, seed=60
    ),
    "replicas on two nodes": Case(
        "standard", (3, 3, 3, 3), (2, 3, 1, 2), nodes=2, rule="even", gradients=True, seed=61
    ),
    "unequal slots": Case("standard", (1, 4, 0, 5), (2, 0, 1, 2), top_k=4, gradients=True, seed=62),
}
STEPS, MICRO, RATE = 4, 2, 0.05


@dataclass(frozen=True)
class Moved:
    """What a rank has: logits of every micro-batch, the whole model (rank 0), rows it sent, and what was refused."""

    logits: list[list[Tensor]]
    state: dict[str, Tensor]
    sent: list[int]
    refused: list[str]


def placements(case: Case) -> list[Placement]:
    """Two that alternate."""
    return [case.placement(), replace(case, seed=case.seed + 100).placement()]


def micro_batches(case: Case) -> list[list[Tensor]]:
    """Tokens of all ranks, `[I, S]`, by step and micro-batch."""
    return [
        [replace(case, seed=case.seed + 10 * step + part).tokens() for part in range(MICRO)] for step in range(STEPS)
    ]


def in_one_process(case: Case) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """The logits of every micro-batch, and the model after all steps."""
    model, logits = case.model(), []
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in micro_batches(case):
        logits.append([_backward(case, model, tokens, slice(None)) for tokens in step])
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= len(case.slots)
        optimizer.step()
        optimizer.zero_grad()
    return logits, model.state_dict()


def moved(world: World) -> list[Moved]:
    """What this rank has, by case."""
    return [_moved(world, case) for case in CASES.values()]


def _moved(world: World, case: Case) -> Moved:
    """Train while experts change places before every micro-batch, between two of one step with their gradients."""
    mine = own(case.batches, world.rank)
    spread = parallelize(case.model(), case.plan())
    model = DistributedDataParallel(spread)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    logits, sent, turn = list[list[Tensor]](), list[int](), 0
    for step in micro_batches(case):
        logits.append([])
        for tokens in step:
            turn += 1
            sent.append(_rebind(case, spread, placements(case)[turn % 2]))
            with model.no_sync():
                logits[-1].append(_backward(case, model, tokens, mine))
        _average(spread)
        optimizer.step()
        optimizer.zero_grad()
    refused = [_refusal(case, spread, mine, other) for other in (False, True)]
    return Moved(logits, full_state_dict(spread), sent, refused)


def _rebind(case: Case, spread: ExpertParallelModel, placement: Placement) -> int:
    """Move all layers to a placement: the rows that this rank sent to others."""
    per_node, rows = len(case.slots) // case.nodes, 0
    for layer, block in enumerate(spread.blocks):
        parameters = [id(one) for one in block.parameters()]
        with mock.patch.object(Route, "move", autospec=True, side_effect=Route.move) as move:
            block.rebind(LayerPlacement.of(placement, layer, devices_per_node=per_node, group=None))
        rows += sum(call.args[0].crossing for call in move.call_args_list)
        assert [id(one) for one in block.parameters()] == parameters
    return rows


def _refusal(case: Case, spread: ExpertParallelModel, mine: slice, other_slots: bool) -> str:
    """What a rank is told that moves experts before a backward pass, or to other numbers of slots."""
    placement = case.placement()
    if other_slots:
        placement = replace(case, slots=tuple(slots + 1 for slots in case.slots)).placement()
    output = None if other_slots else spread(case.tokens()[mine])
    refusal = refusal_of(lambda: _rebind(case, spread, placement))
    del output
    return refusal


def _backward(case: Case, model: nn.Module, tokens: Tensor, mine: slice) -> Tensor:
    logits: Tensor = model(tokens[mine])
    (logits * case.upstream()[mine]).sum().backward()  # type: ignore[no-untyped-call]
    return logits.detach()


def _average(spread: ExpertParallelModel) -> None:
    """Average the gradients of all but experts over ranks, as a synchronising backward pass would."""
    experts = {parameter for block in spread.blocks for parameter in block.parameters()}
    for parameter in spread.parameters():
        if parameter not in experts:
            assert parameter.grad is not None
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= torch.distributed.get_world_size()
