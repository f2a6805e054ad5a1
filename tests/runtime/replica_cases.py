"""What ranks find of experts with one owner and of replicas that change at every step; imported by spawned processes.

Legend: E experts; D ranks; L MoE layers.
"""

import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args
from unittest import mock

import numpy as np
import torch
import torch._dynamo  # optimizers load it, each rank for itself where its nursery has not
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.engine.layer_placement import LayerPlacement
from moeplan.runtime.engine.replica_rows import Outgoing, ReplicaRows
from moeplan.runtime.engine.weights import Weights
from moeplan.runtime.expert_parallel import ExpertParallelModel
from moeplan.runtime.gradients import clip_grad_norm_
from moeplan.runtime.parallel import ReplicaMemory
from moeplan.runtime.whole import full_optimizer_state, full_state_dict
from moeplan.solvers.placement import Placement, ReplicaRule
from tests.runtime.rank_cases import Case
from tests.runtime.worlds import own, refusal_of

STEPS, SAVED_AT = 50, 23
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.3),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}


@dataclass(frozen=True)
class Training:
    """50 steps under placements that are drawn before every step."""

    optimizer: str
    moves: bool = False  #: Whether experts change their owners, too, every third step
    broken: str = ""  #: What is left out, so that it must go wrong: "weights", "gradients" or "states"
    seed: int = 0

    def case(self, num_ranks: int) -> Case:
        """The model and its batches."""
        return Case(
            "standard", (8 // num_ranks + 2,) * num_ranks, (1,) * num_ranks, rule="even", gradients=True, seed=5
        )

    def owners(self, num_ranks: int) -> Iterator[tuple[np.ndarray, Placement]]:
        """Before every step, the owner of each expert, `[L, E]`, and a placement that lets it be."""
        case, rng = self.case(num_ranks), np.random.default_rng(self.seed)
        owner_LE = np.tile(np.repeat(np.arange(num_ranks), 8 // num_ranks), (case.num_layers, 1))
        for step in range(STEPS):
            if self.moves and step % 3 == 1:
                owner_LE = np.stack([rng.permutation(row) for row in owner_LE])
                others_LE = owner_LE.copy()
                others_LE[:, rng.integers(8)] = rng.integers(num_ranks)  # one more on one rank, one less on another
                if max(np.bincount(owner_E).max() for owner_E in others_LE) <= case.slots[0] and not self.broken:
                    owner_LE = others_LE
            rows = [
                [_filled(np.flatnonzero(owner_E == rank), slots, rng) for rank, slots in enumerate(case.slots)]
                for owner_E in owner_LE
            ]
            yield owner_LE, Placement.from_sets(rows, 8, ReplicaRule(case.rule))


def _filled(owned: np.ndarray, slots: int, rng: np.random.Generator) -> list[int]:
    others = rng.permutation(np.setdiff1d(np.arange(8), owned))
    return [*owned.tolist(), *others[: slots - len(owned)].tolist()]


@dataclass
class Trained:
    """What a training leaves: the loss of every step, the model and its optimizer on rank 0, the replicas compared."""

    losses: list[float]
    state: dict[str, Tensor]
    optimizer: dict[str, Any]
    saved: dict[str, Tensor] = field(default_factory=dict)  #: The model after `SAVED_AT` steps
    compared: int = 0  #: Rows of replicas that were held against their owner's
    equal: bool = True  #: Whether all were equal to the bit


def in_one_process(training: Training, num_ranks: int) -> Trained:
    """The training of the whole model."""
    case = training.case(num_ranks)
    model, losses, saved = case.model(), list[float](), dict[str, Tensor]()
    optimizer = OPTIMIZERS[training.optimizer](model.parameters())
    for step in range(STEPS):
        loss = loss_of(model(case.tokens(step)), case.upstream()).sum() / num_ranks
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step == SAVED_AT:
            saved = {name: value.clone() for name, value in model.state_dict().items()}
    return Trained(losses, model.state_dict(), optimizer.state_dict(), saved)


def loss_of(logits: Tensor, upstream: Tensor) -> Tensor:
    return (logits - upstream).square().mean((1, 2))


def trained(world: World, trainings: list[Training]) -> list[Trained]:
    """What this rank has of each."""
    return [_trained(world, training) for training in trainings]


def _trained(world: World, training: Training) -> Trained:
    case = training.case(world.size)
    mine, losses, answer = own(case.batches, world.rank), list[float](), Trained([], {}, {})
    spread = parallelize(case.model(), case.plan())
    optimizer = None
    for step, (owner_LE, placement) in enumerate(training.owners(world.size)):
        _rebind(spread, owner_LE, placement, None if training.broken == "states" else optimizer)
        if optimizer is None:  # the first placement is the start
            loop = DistributedDataParallel(spread)
            optimizer = OPTIMIZERS[training.optimizer](loop.parameters())
        with _broken(training.broken, step):
            loss = loss_of(loop(case.tokens(step)[mine]), case.upstream()[mine]).sum()
            answer.equal &= _compare(spread, world, answer)
            loss.backward()  # type: ignore[no-untyped-call]
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / world.size)
        optimizer.step()
        optimizer.zero_grad()
        if step == SAVED_AT:
            answer.saved = {name: value.clone() for name, value in full_state_dict(loop).items()}
    assert optimizer is not None
    answer.losses, answer.state = losses, full_state_dict(loop)
    answer.optimizer = full_optimizer_state(loop, optimizer)
    return answer


def _rebind(
    spread: ExpertParallelModel,
    owner_LE: np.ndarray,
    placement: Placement,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    for layer, block in enumerate(spread.blocks):
        here = LayerPlacement.of(placement, layer, devices_per_node=1, group=None, owner=owner_LE[layer])
        assert (here.owner == owner_LE[layer]).all()
        block.rebind(here, optimizer)


def _broken(what: str, step: int) -> Any:
    """A step that lacks something."""
    if what == "weights" and step:
        return mock.patch.object(Outgoing, "wait", lambda outgoing: 0 * _wait(outgoing))
    if what == "gradients":
        return mock.patch.object(ReplicaRows, "summed", lambda rows, row_RW: 0 * _summed(rows, row_RW))
    return mock.MagicMock()


_wait, _summed = Outgoing.wait, ReplicaRows.summed


def _compare(spread: ExpertParallelModel, world: World, answer: Trained) -> bool:
    """Whether the rows that experts computed with are those of their owners."""
    equal, theirs = True, list[Any]([None] * world.size)
    mine = [[stack.detach().numpy() for stack in block.weights.leaves] for block in spread.blocks]
    torch.distributed.all_gather_object(theirs, mine)
    for layer, block in enumerate(spread.blocks):
        owner_E = block.placement.owner
        for slot, expert in enumerate(block.held[len(block.owned) :], len(block.owned)):
            row = (owner_E[:expert] == owner_E[expert]).sum()
            for number, stack in enumerate(mine[layer]):
                equal &= np.array_equal(stack[slot], theirs[owner_E[expert]][layer][number][row])
                answer.compared += 1
    return equal


# One step, in many ways

REPLICAS = Case("standard", (6, 6), (2, 2), gradients=True, seed=9, rule="even")
MICRO = 3


@dataclass
class Ways:
    """What one step leaves on this rank: gradients by the way of accumulating, and facts by name."""

    gradients: dict[str, list[Tensor]]
    shared: dict[str, list[Tensor]]  #: The same where layers share the memory of replicas
    sums: dict[str, int]  #: Times that gradients of replicas were summed
    facts: dict[str, Any]


def ways(world: World, _payload: None) -> Ways:
    """Micro-batches in several ways; the same gradients each."""
    answer = Ways({}, {}, {}, {})
    for name, way in WAYS.items():
        with mock.patch.object(ReplicaRows, "summed", autospec=True, side_effect=_summed) as spy:
            answer.gradients[name] = _gradients(world, way, "resident")
        answer.sums[name] = spy.call_count
        answer.shared[name] = _gradients(world, way, "shared")
    with mock.patch.object(Weights, "restore"):
        answer.shared["not brought back"] = _gradients(world, _plain, "shared")
    answer.facts = {name: fact(world) for name, fact in FACTS.items()}
    return answer


def _gradients(world: World, way: Callable[[Any, World], None], memory: ReplicaMemory) -> list[Tensor]:
    """Gradients of the experts here."""
    model = parallelize(REPLICAS.model(), REPLICAS.plan(), replica_memory=memory)
    way(model, world)
    return [known.grad.clone() for block in model.blocks for known in block.parameters() if known.grad is not None]


def _micro(model: nn.Module, world: World, part: int) -> Tensor:
    mine = own(REPLICAS.batches, world.rank)
    logits: Tensor = model(REPLICAS.tokens(part)[mine])
    return (logits * REPLICAS.upstream()[mine]).sum()


def _plain(model: ExpertParallelModel, world: World) -> None:
    for part in range(MICRO):
        _micro(model, world, part).backward()  # type: ignore[no-untyped-call]


def _no_sync(model: ExpertParallelModel, world: World) -> None:
    with model.no_sync():
        for part in range(MICRO - 1):
            _micro(model, world, part).backward()  # type: ignore[no-untyped-call]
    _micro(model, world, MICRO - 1).backward()  # type: ignore[no-untyped-call]


def _no_sync_of_ddp(model: ExpertParallelModel, world: World) -> None:
    loop = DistributedDataParallel(model)
    with loop.no_sync():
        for part in range(MICRO - 1):
            _micro(loop, world, part).backward()  # type: ignore[no-untyped-call]
    _micro(loop, world, MICRO - 1).backward()  # type: ignore[no-untyped-call]


def _all_put_off(model: ExpertParallelModel, world: World) -> None:
    with model.no_sync():
        _plain(model, world)
    torch.optim.SGD(model.parameters(), lr=0.0).step()


def _interleaved(model: ExpertParallelModel, world: World) -> None:
    """As pipelines of stages do."""
    waiting = [_micro(model, world, 0), _micro(model, world, 1)]
    waiting.pop(0).backward()  # type: ignore[no-untyped-call]
    waiting.append(_micro(model, world, 2))
    for loss in waiting:
        loss.backward()  # type: ignore[no-untyped-call]


def _evaluated_between(model: ExpertParallelModel, world: World) -> None:
    """With forwards of other tokens between a forward and its backward pass."""
    for part in range(MICRO):
        loss = _micro(model, world, part)
        with torch.no_grad():
            _micro(model, world, MICRO - 1 - part)
        loss.backward()  # type: ignore[no-untyped-call]


WAYS: dict[str, Callable[[Any, World], None]] = {
    "summed every time": _plain,
    "no_sync": _no_sync,
    "no_sync of DDP": _no_sync_of_ddp,
    "all put off": _all_put_off,
    "one forward, one backward": _interleaved,
    "evaluated between": _evaluated_between,
}


def _dropped(world: World) -> bool:
    """Whether gradients that were put off and then zeroed are in no later sum."""
    grads = []
    for early in (False, True):
        model = parallelize(REPLICAS.model(), REPLICAS.plan())
        if early:
            with model.no_sync():
                _micro(model, world, 1).backward()  # type: ignore[no-untyped-call]
            model.zero_grad()
        _micro(model, world, 0).backward()  # type: ignore[no-untyped-call]
        grads.append([known.grad for known in model.blocks[0].parameters()])
    return all(torch.equal(one, other) for one, other in zip(*grads, strict=True) if one is not None)


def _by_hand(world: World, memory: ReplicaMemory = "resident") -> list[bool]:
    """Whether forwards follow weights that are changed by hand, as an average of weights is; a copy is its own."""
    model = parallelize(REPLICAS.model(), REPLICAS.plan(), replica_memory=memory)
    tokens = REPLICAS.tokens()[own(REPLICAS.batches, world.rank)]
    whole = REPLICAS.model()
    followed = []
    other = copy.deepcopy(model)
    for factor in (1.0, 0.5, 2.0):
        for one, place in ((model, "experts.local"), (whole, "experts")):
            for name, parameter in one.named_parameters():
                if f".{place}." in name:
                    parameter.data = parameter.data if factor == 1 else parameter.data * factor
        with torch.inference_mode():
            followed.append(torch.allclose(model(tokens), whole(tokens), rtol=1e-12))
    with torch.no_grad():
        followed.append(torch.allclose(other(tokens), REPLICAS.model()(tokens), rtol=1e-12))
    return followed


def _saved_rows(world: World) -> tuple[list[int], int, int]:
    """Rows of a stacked weight in the state, and bytes of what torch.save writes and of the replicas."""
    model = parallelize(REPLICAS.model(), REPLICAS.plan())
    _micro(model, world, 0)
    block, stream = model.blocks[0], io.BytesIO()
    torch.save(block.state_dict(), stream)
    rows = [len(block.owned), *(len(value) for name, value in block.state_dict().items() if name.startswith("local."))]
    return rows, len(stream.getvalue()), block.weights.replica_bytes


def _norms(world: World) -> tuple[float, float]:
    """The norm of all gradients while some are put off, and that of a single process."""
    model, whole = parallelize(REPLICAS.model(), REPLICAS.plan(), gradients="sum"), REPLICAS.model()
    loop = DistributedDataParallel(model)
    (whole(REPLICAS.tokens()) * REPLICAS.upstream()).sum().backward()
    with model.no_sync():
        pass
    _micro(loop, world, 0).backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        if parameter.grad is not None and not any(parameter is known for b in model.blocks for known in b.parameters()):
            parameter.grad *= world.size
    return clip_grad_norm_(loop, 1.0).item(), nn.utils.clip_grad_norm_(whole.parameters(), 1.0).item()


def _frozen(world: World) -> int:
    """Times that weights were sent in three steps in which experts are frozen."""
    model = parallelize(REPLICAS.model(), REPLICAS.plan())
    for block in model.blocks:
        block.requires_grad_(False)
    with mock.patch.object(Weights, "send", autospec=True, side_effect=Weights.send) as send:
        for part in range(3):
            _micro(model, world, part).backward()  # type: ignore[no-untyped-call]
    return send.call_count


def _ahead(world: World, memory: ReplicaMemory = "resident") -> list[str]:
    """Events of two forwards after a step, and of a backward pass: whose weights leave, and which layer computes."""
    model, events = parallelize(REPLICAS.model(), REPLICAS.plan(), replica_memory=memory), list[str]()
    numbers = {id(block.weights): layer for layer, block in enumerate(model.blocks)}
    _micro(model, world, 0).backward()  # type: ignore[no-untyped-call]
    send, lent = Weights.send, Weights.lent

    def sending(weights: Weights) -> None:
        events.append(f"send {numbers[id(weights)]}")
        send(weights)

    def lending(weights: Weights) -> Any:
        events.append(f"compute {numbers[id(weights)]}")
        return lent(weights)

    with mock.patch.object(Weights, "send", sending), mock.patch.object(Weights, "lent", lending):
        _micro(model, world, 1)
        _micro(model, world, 1).backward()  # type: ignore[no-untyped-call]
    return events


def _memories(world: World) -> tuple[int, int, int, int]:
    """Bytes of replicas, of the model, of layers apart; those where layers share them, and those of what is owned."""
    resident, shared = (
        parallelize(REPLICAS.model(), REPLICAS.plan(), replica_memory=memory) for memory in get_args(ReplicaMemory)
    )
    apart = sum(block.weights.replica_bytes for block in shared.blocks)
    owned = sum(one.nbytes for one in shared.blocks[0].parameters())
    return resident.replica_bytes, apart, shared.replica_bytes, owned


def _changed_between(world: World) -> list[str]:
    """What is said of backward passes after weights changed that their forwards had, by the memory of replicas."""
    said = []
    for memory in get_args(ReplicaMemory):
        model = parallelize(REPLICAS.model(), REPLICAS.plan(), replica_memory=memory)
        early = _micro(model, world, 0)
        with torch.no_grad():
            for parameter in model.blocks[0].parameters():
                parameter.mul_(0.5)
        _micro(model, world, 1).backward()  # type: ignore[no-untyped-call]
        said.append(refusal_of(early.backward))
    return said


class Lamb(torch.optim.Optimizer):
    """An optimizer that goes by norms of whole parameters."""

    def __init__(self, own: list[nn.Parameter]) -> None:
        super().__init__(own, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take no step."""


def _refused(world: World) -> dict[str, str]:
    """What is said where owners change under optimizers whose states are not by expert."""
    said = {}
    optimizers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "Adafactor": lambda own: torch.optim.Adafactor(own),
        "Lamb": Lamb,
        "copies": lambda own: torch.optim.AdamW([nn.Parameter(one.detach().clone()) for one in own]),
        "AdamW": lambda own: torch.optim.AdamW(own),
        "steps": lambda own: torch.optim.AdamW(own),
    }
    for name, made in optimizers.items():
        model = parallelize(REPLICAS.model(), REPLICAS.plan())
        optimizer: Any = made([*model.parameters()])
        _micro(model, world, 0).backward()  # type: ignore[no-untyped-call]
        if name != "steps" or world.rank == 0:
            optimizer.step()
        block, before = model.blocks[0], [one.detach().clone() for one in model.blocks[0].parameters()]
        other = (block.placement.owner + 1) % 2
        rows = [
            [np.union1d(np.flatnonzero(other == rank), np.arange(3 * rank, 3 * rank + 2)).tolist() for rank in (0, 1)]
        ]
        rows = [
            [
                sorted({*row, *range(8)} if len(row) > 6 else [*row, *np.setdiff1d(np.arange(8), row)[: 6 - len(row)]])
                for row in rows[0]
            ]
        ]
        here = LayerPlacement.of(Placement.from_sets(rows, 8), 0, devices_per_node=1, group=None, owner=other)
        said[name] = refusal_of(partial(block.rebind, here, optimizer))
        if said[name] != "accepted":
            assert all(torch.equal(one, kept) for one, kept in zip(block.parameters(), before, strict=True))
    return said


FACTS: dict[str, Callable[[World], Any]] = {
    "dropped": _dropped,
    "by hand": _by_hand,
    "saved": _saved_rows,
    "norms": _norms,
    "ahead": _ahead,
    "ahead where memory is shared": partial(_ahead, memory="shared"),
    "by hand where memory is shared": partial(_by_hand, memory="shared"),
    "memories": _memories,
    "changed between": _changed_between,
    "frozen": _frozen,
    "refused": _refused,
}
