"""What ranks find of trainings whose replicas follow the load; imported by spawned processes.

Legend: L MoE layers; E experts; D ranks; S slots.
"""

import copy
import dataclasses
import gc
import io
import math
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args
from unittest import mock

import numpy as np
import torch
import torch._dynamo  # optimizers load it, each rank for itself where its nursery has not
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moeplan.profilers.exchanged import Exchange
from moeplan.profilers.world import World
from moeplan.runtime import load_plan, parallelize, schedule_of
from moeplan.runtime.decisions import PipelineDecision, PlacementDecision, SidecarFile
from moeplan.runtime.engine import rebinding
from moeplan.runtime.expert_parallel import ExpertParallelModel
from moeplan.runtime.gradients import expert_parameters
from moeplan.runtime.parallel import ReplicaMemory
from moeplan.runtime.plan import Plan, save
from moeplan.runtime.rebalancer import Rebalancer
from moeplan.runtime.rebalancing import tables_of
from moeplan.runtime.schedule import KINDS, PLAN, Schedule
from moeplan.runtime.whole import full_state_dict
from moeplan.solvers.flexmoe import Seen, follow
from tests.runtime.plans import COSTS, eager, made_plan
from tests.runtime.rank_cases import Case
from tests.runtime.replica_cases import OPTIMIZERS, Lamb, loss_of
from tests.runtime.worlds import own, refusal_of

STEPS, RESUMED_AT, EXPERTS = 50, 11, 8
RULE = "moeplan.runtime.rebalancer.policy_of"


@dataclass(frozen=True)
class Anything:
    """A rule that draws tables, with empty slots and other owners, at four records of five."""

    seed: int = 0
    window: int = 2

    def __call__(self, seen: Seen) -> np.ndarray | None:
        rng = np.random.default_rng([self.seed, int(seen.window.sum()), seen.record, seen.layer])
        return None if rng.random() < 0.2 else drawn(seen.table.shape, rng)


@dataclass(frozen=True)
class InTurn:
    """A rule that takes two tables in turn."""

    window: int = 1

    def __call__(self, seen: Seen) -> np.ndarray:
        return drawn(seen.table.shape, np.random.default_rng(seen.record % 2))


@dataclass(frozen=True)
class ByRank:
    """A rule that decides otherwise on every rank, as floating point may on other CPUs."""

    window: int = 1

    def __call__(self, seen: Seen) -> np.ndarray:
        return drawn(seen.table.shape, np.random.default_rng([torch.distributed.get_rank(), seen.record, seen.layer]))


def drawn(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Every expert in a slot, and in half of the others one that its device lacks, `[D, S]`."""
    table = np.full(shape, -1)
    table.flat[rng.permutation(table.size)[:EXPERTS]] = rng.permutation(EXPERTS)
    for device, slot in np.argwhere(table < 0):
        expert = rng.integers(EXPERTS)
        if rng.random() < 0.6 and expert not in table[device]:
            table[device, slot] = expert
    return table


@dataclass(frozen=True)
class Run:
    """A training under a rule."""

    optimizer: str = "sgd"
    rule: Callable[[Seen], np.ndarray | None] | None = None  #: In place of the plan's policy
    micro: int = 1  #: Micro-batches of a step
    steps: int = STEPS
    trigger: float = 1.0
    record_steps: int = 1
    layers: int = 3
    #: "eval", "unused", "reentrant" or "not reentrant": what must not count, or once only; "degrees", "autocast",
    #: "fsdp", "fsdp by layer", "rounds"; "skipped": some optimizer steps are not taken, as by a gradient scaler;
    #: "changed": weights and states are written to between steps
    beside: str = ""
    moves_per_step: int | None = None
    memory: ReplicaMemory = "resident"

    def case(self, num_ranks: int) -> Case:
        """The model; its first placement is of two slots a device more than experts need."""
        slots, dtype = (EXPERTS // num_ranks + 2,) * num_ranks, torch.float32 if self.autocast else torch.float64
        sizes: dict[str, Any] = {"length": 12, "num_layers": self.layers, "dtype": dtype}
        return Case("standard", slots, (1,) * num_ranks, rule="quota", gradients=True, seed=5, **sizes)

    @property
    def autocast(self) -> bool:
        """Whether products are of bfloat16."""
        return self.beside == "autocast"

    def plan(self, num_ranks: int) -> Plan:
        """A plan whose policy looks at every record."""
        case = self.case(num_ranks)
        every, start = int(self.trigger == 1.0), PlacementDecision.of(case.placement())
        rebalancing = eager(start, trigger=self.trigger, every=every, record_steps=self.record_steps)
        degrees = PipelineDecision(forward=(2, 1, 4), backward=(1, 3, 2)) if self.beside == "degrees" else None
        return made_plan(case.plan().cluster, case.plan().model, rebalancing=rebalancing, pipeline=degrees)

    def tokens(self, case: Case, step: int, part: int) -> Tensor:
        """Tokens of all ranks, of which few are frequent, so that few experts are busy."""
        generator = torch.Generator().manual_seed(1000 * part + step)
        frequency = 1 / torch.arange(1, 51).double() ** 1.26
        flat = torch.multinomial(frequency, sum(case.batches) * case.length, True, generator=generator)
        return flat.view(-1, case.length)


@dataclass
class Trained:
    """What a training leaves on a rank."""

    losses: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)  #: On rank 0
    tables: list[np.ndarray] = field(default_factory=list)  #: After every step, `[L, D, S]`
    held: list[list[list[int]]] = field(default_factory=list)  #: Here, by step and layer
    counts: list[np.ndarray] = field(default_factory=list)  #: Of every step, from what was routed here, `[L, E]`
    recorded: list[np.ndarray] = field(default_factory=list)  #: The last record after every step, `[L, E, D]`
    balance: list[np.ndarray] = field(default_factory=list)
    computed: list[list[int]] = field(default_factory=list)  #: Pairs here in the last forward of a step, by layer
    coming: list[list[int]] = field(default_factory=list)  #: After every step, layers whose experts are on their way
    owners: np.ndarray = field(default_factory=lambda: np.empty(0))  #: At the start, `[L, E]`
    facts: dict[str, Any] = field(default_factory=dict)


def in_one_process(run: Run, num_ranks: int) -> Trained:
    """The training of the whole model."""
    case, answer = run.case(num_ranks), Trained()
    model = case.model()
    optimizer = OPTIMIZERS[run.optimizer](model.parameters())
    for step in range(run.steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=run.autocast):
            logits = [model(run.tokens(case, step, part)) for part in range(run.micro)]
        losses = [loss_of(one, case.upstream()).sum() for one in logits]
        loss = sum(losses, torch.zeros(())) / run.micro / num_ranks
        loss.backward()  # type: ignore[no-untyped-call]
        answer.losses.append(loss.item())
        _end(run, step, optimizer, model.parameters())
    answer.state = model.state_dict()
    return answer


def _end(run: Run, step: int, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Take a step, or what comes in its place, and what follows it."""
    if run.beside != "skipped" or step % 3:
        optimizer.step()
    optimizer.zero_grad()
    if run.beside == "changed":
        for parameter in parameters:
            parameter.data.mul_(0.99)  # behind autograd's back
            for value in optimizer.state[parameter].values():
                value.data.mul_(0.9 if value.ndim else 1)


def trained(world: World, runs: list[Run]) -> list[Trained]:
    """What this rank has of each."""
    return [_trained(world, run) for run in runs]


def _made(world: World, run: Run, **options: Any) -> ExpertParallelModel:
    case = run.case(world.size)
    with mock.patch(RULE, return_value=(run.rule, COSTS)) if run.rule else mock.MagicMock():
        spread = parallelize(
            case.model(),
            run.plan(world.size),
            moves_per_step=run.moves_per_step,
            replica_memory=run.memory,
            **options,
        )
    if "reentrant" in run.beside:
        for layer in spread.model.layers:  # type: ignore[union-attr]
            block, forward = layer.moe, layer.moe.forward
            again = run.beside == "reentrant"
            block.forward = lambda *args, forward=forward, again=again: checkpoint(forward, *args, use_reentrant=again)
    return spread


def _wrapped(run: Run, spread: ExpertParallelModel) -> Any:
    """A loop over the ranks: DistributedDataParallel, or the model itself, sharded."""
    if "fsdp" not in run.beside:
        return DistributedDataParallel(spread)
    ignored = set(expert_parameters(spread))
    for layer in spread.model.layers if run.beside == "fsdp by layer" else ():  # type: ignore[union-attr]
        fully_shard(layer, ignored_params=ignored)
    return fully_shard(spread, ignored_params=ignored)


def _trained(world: World, run: Run) -> Trained:
    rounds = mock.patch.object(rebinding, "ROUND_BYTES", 0) if run.beside == "rounds" else mock.MagicMock()
    with rounds, mock.patch.object(rebinding, "move_experts", wraps=rebinding.move_experts) as moved_again:
        answer = _trained_so(world, run)
    answer.facts["sent again"] = moved_again.call_count
    return answer


def _trained_so(world: World, run: Run) -> Trained:
    answer, spread = Trained(), _made(world, run)
    loop = _wrapped(run, spread)
    optimizer = OPTIMIZERS[run.optimizer](loop.parameters())
    answer.owners = np.stack([block.placement.owner for block in spread.blocks])
    for step in range(run.steps):
        _step(world, run, loop, optimizer, step, answer)
    answer.state = full_state_dict(loop)
    answer.facts = _done(spread)
    return answer


def _rebalancing(spread: ExpertParallelModel) -> Rebalancer:
    assert spread.rebalancing is not None
    return spread.rebalancing


def _done(spread: ExpertParallelModel) -> dict[str, Any]:
    done = _rebalancing(spread)
    return {
        "operations": done.operations,
        "changes": done.changes,
        "moved": done.moved,
        "planning_s": done.planning_s,
        "steps": done.step,
    }


def _step(world: World, run: Run, loop: Any, optimizer: torch.optim.Optimizer, step: int, answer: Trained) -> None:
    spread, case = getattr(loop, "module", loop), run.case(world.size)
    mine, counts = own(case.batches, world.rank), np.zeros((case.num_layers, EXPERTS), np.int64)
    total = torch.zeros((), dtype=torch.float64)
    for part in range(run.micro):
        with loop.no_sync() if part + 1 < run.micro else mock.MagicMock():
            with torch.autocast("cpu", torch.bfloat16, enabled=run.autocast):
                logits = loop(run.tokens(case, step, part)[mine])
            loss = loss_of(logits, case.upstream()[mine]).sum() / run.micro
            counts += [np.bincount(routed.ids.flatten(), minlength=EXPERTS) for routed in spread.routed]
            answer.computed.append(spread.traffic.loads if part + 1 == run.micro else [])
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    if run.beside == "eval":
        with torch.no_grad():
            spread(case.tokens(step)[mine])
    if run.beside == "unused":
        spread.eval()(case.tokens(step)[mine])  # in training mode routers keep the graph
        spread.train()
    torch.distributed.all_reduce(total)
    _end(run, step, optimizer, loop.parameters())
    done = _rebalancing(spread)
    kept = done.state_dict()
    answer.losses.append(total.item() / world.size)
    answer.counts.append(counts)
    answer.recorded += [kept["window"][-1].numpy()] if kept["window"] else []
    answer.balance.append(done.balance)
    answer.coming.append(kept["coming"])
    answer.tables.append(done.tables.copy())
    answer.held.append([block.held for block in spread.blocks])


# Beside trainings


#: Tables after every step of a schedule, those expected by step, pairs computed, and losses
Replayed = tuple[list[np.ndarray], dict[int, np.ndarray], list[list[int]], list[float]]


def facts(world: World, _payload: None) -> dict[str, Any]:
    """Facts by name."""
    return {name: fact(world) for name, fact in FACTS.items()}


def _resumed(
    world: World, moves_per_step: int | None = None
) -> dict[str, tuple[list[np.ndarray], list[float], list[Any]]]:
    """Tables, losses and logs of a training, of the same one resumed by each rank, and resumed from rank 0's files."""
    run, found = Run("adamw", Anything(3), steps=20, moves_per_step=moves_per_step), {}
    whole, spread = Trained(), _made(world, run)
    loop, stream = DistributedDataParallel(spread), io.BytesIO()
    optimizer = OPTIMIZERS["adamw"](loop.parameters())
    for step in range(run.steps):
        if step == RESUMED_AT:
            assert _rebalancing(spread).state_dict()["coming"]  # in the midst of a move
            states = _rebalancing(spread).state_dict(), spread.model.state_dict(), optimizer.state_dict()
            torch.save(copy.deepcopy(states), stream)
        _step(world, run, loop, optimizer, step, whole)
    found["whole"] = whole.tables[RESUMED_AT:], whole.losses[RESUMED_AT:], _rebalancing(spread).operations
    for early in (True, False):
        stream.seek(0)
        rebalancing, model, state = torch.load(stream, weights_only=True)
        again, spread = Trained(), _made(world, run)
        loop = DistributedDataParallel(spread)
        optimizer = OPTIMIZERS["adamw"](loop.parameters())
        if early:
            _rebalancing(spread).load_state_dict(rebalancing)
            spread.model.load_state_dict(model)
            optimizer.load_state_dict(state)
        else:  # states are there before, so that they move with the experts
            _step(world, run, loop, optimizer, 0, Trained())
            _rebalancing(spread).load_state_dict(rebalancing, optimizer)
            spread.model.load_state_dict(model)
            shapes = [[value.shape for value in one.values()] for one in optimizer.state_dict()["state"].values()]
            assert shapes == [[value.shape for value in one.values()] for one in state["state"].values()]
            optimizer.load_state_dict(state)
        for step in range(RESUMED_AT, run.steps):
            _step(world, run, loop, optimizer, step, again)
        found["early" if early else "late"] = again.tables, again.losses, _rebalancing(spread).operations
    return found


def _replayed(world: World) -> Replayed:
    """Of drawn tables."""
    run, rng = Run("adamw", steps=12), np.random.default_rng(1)
    shape = tables_of(run.case(world.size).placement()).shape
    schedule = {step: np.stack([drawn(shape[1:], rng) for _ in range(shape[0])]) for step in (0, 1, 2, 5, 11)}
    return _replay(world, run, schedule, schedule)


def _replayed_from_file(world: World) -> Replayed:
    """Of what lies beside a plan, and what the evaluation held at every step."""
    run, case = Run("adamw", steps=12), Run().case(world.size)
    plan, start = run.plan(world.size), tables_of(case.placement())
    sizes = run.steps + 1, case.num_layers, 1, EXPERTS, world.size
    records = np.random.default_rng(2).integers(1, 9, sizes)
    evaluated = follow(records, start, Anything(4), COSTS, group=plan.cluster.devices_per_node)
    rows = [
        (one.record, one.layer, KINDS.index(one.kind), *dataclasses.astuple(one)[3:]) for one in evaluated.operations
    ]
    schedule = Schedule(np.arange(run.steps + 1), np.array(rows), {PLAN: np.ones(sizes[:2])})
    file = SidecarFile.of("schedule", schedule.to_bytes())
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, file.file).write_bytes(schedule.to_bytes())
        assert plan.decisions.rebalancing is not None
        decision = plan.decisions.rebalancing.model_copy(update={"schedule": file})
        save(made_plan(plan.cluster, plan.model, rebalancing=decision), Path(folder, "plan.json"))
        tables = schedule_of(load_plan(Path(folder, "plan.json")))
    return _replay(world, run, tables, dict(enumerate(evaluated.tables[evaluated.period])))


def _replay(world: World, run: Run, schedule: dict[int, np.ndarray], expected: dict[int, np.ndarray]) -> Replayed:
    answer, spread = Trained(), _made(world, run, schedule=schedule)
    answer.tables.append(_rebalancing(spread).tables.copy())
    loop = DistributedDataParallel(spread)
    optimizer = OPTIMIZERS["adamw"](loop.parameters())
    for step in range(run.steps):
        _step(world, run, loop, optimizer, step, answer)
    return answer.tables, expected, answer.computed, answer.losses


@dataclass(frozen=True)
class Memory:
    """What a rank has at a time."""

    tensor_bytes: int
    count: int  #: Of storages
    resident_bytes: int  #: Of the process

    @classmethod
    def now(cls) -> "Memory":
        gc.collect()
        tensors = [one.untyped_storage() for one in gc.get_objects() if isinstance(one, Tensor)]
        storages = {storage.data_ptr(): storage.nbytes() for storage in tensors}
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return cls(sum(storages.values()), len(storages), resident)


def _memory(world: World) -> list[Memory]:
    """Memory after 200 and 500 steps of tables that change in turn."""
    run, found = Run("adamw", InTurn(), layers=1), list[Memory]()
    spread = _made(world, run)
    loop = DistributedDataParallel(spread)
    optimizer = OPTIMIZERS["adamw"](loop.parameters())
    for step in range(500):
        _step(world, run, loop, optimizer, step, Trained())
        found += [Memory.now()] if step + 1 in (200, 500) else []
    return found


def _row_bytes(world: World) -> int:
    """Bytes of the weights of an expert."""
    spread = _made(world, Run())
    return sum(one[0].nbytes for one in spread.blocks[0].parameters())


def _by_itself(world: World) -> np.ndarray:
    """What this rank would decide under the rule of `ByRank`."""
    seen = Seen(0, 0, np.ones((1, 1, EXPERTS, world.size), np.int64), np.zeros((world.size, 6)), *[None] * 4)  # type: ignore[arg-type]
    return ByRank()(seen)


def _backward(world: World, run: Run, spread: ExpertParallelModel, step: int) -> None:
    case = run.case(world.size)
    mine = own(case.batches, world.rank)
    loss = loss_of(spread(run.tokens(case, step, 0)[mine]), case.upstream()[mine]).sum()
    loss.backward()  # type: ignore[no-untyped-call]


def _two_steps(
    world: World,
    run: Run,
    made: Callable[[ExpertParallelModel], torch.optim.Optimizer],
    *,
    beside: Literal["", "kept", "let go"] = "",
    **options: Any,
) -> str:
    """Words in three steps under an optimizer, with forwards beside that get no backward pass.

    Outputs are kept, or let go in evaluation mode (in training mode routers keep the graph) while exchanges still hold
    all that was sent and arrived, as slow threads of theirs do.
    """
    spread, case = _made(world, run, **options), run.case(world.size)
    optimizer, mine = made(spread), own(case.batches, world.rank)
    start, held = Exchange.start, list[Any]()

    def holding(*args: Any, **more: Any) -> Any:
        held.append(args)
        return start(*args, **more)

    def steps() -> None:
        for step in range(3):
            _backward(world, run, spread, step)
            spread.train(beside != "let go")
            output = spread(case.tokens()[mine]) if beside else None
            if beside == "let go":
                output = None
            spread.train()
            optimizer.step()
            del output

    with mock.patch.object(Exchange, "start", holding):
        said = refusal_of(steps)
    assert held, "exchanges were not held"
    return said


def _dense(spread: ExpertParallelModel) -> list[nn.Parameter]:
    experts = {id(one) for block in spread.blocks for one in block.parameters()}
    return [one for one in spread.parameters() if id(one) not in experts]


class Lars(torch.optim.SGD):
    """An optimizer whose step goes by the norm of all experts together."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """SGD's, of gradients over their norm."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm())
        super().step(closure)


class Named(torch.optim.SGD):
    """SGD by another name."""


def by_paper(plan: Plan) -> Plan:
    """The plan by the paper's policy."""
    decided = plan.decisions.rebalancing
    assert decided is not None
    decisions = plan.decisions.model_copy(update={"rebalancing": decided.model_copy(update={"method": "paper"})})
    return plan.model_copy(update={"decisions": decisions})


def _refused(world: World) -> dict[str, str]:
    """What is said where it cannot be done."""
    run, one = Run("adamw", Anything()), Run("adamw")
    table = tables_of(one.case(world.size).placement())
    lacking = table.copy()
    lacking[1][lacking[1] == 3] = -1
    other = table if world.rank == 0 else table[:, ::-1]
    plain = one.case(world.size).plan()

    def scheduled(schedule: Any, plan: Plan | None = None) -> str:
        case = one.case(world.size)
        return refusal_of(partial(parallelize, case.model(), plan or one.plan(world.size), schedule=schedule))

    def loaded(change: Callable[[Any], Any], done: Rebalancer | None = None) -> str:
        """What is said of a changed state; a refusal leaves all as it was."""
        done = done or _rebalancing(_made(world, one))
        before = repr(done.state_dict())
        said = refusal_of(partial(done.load_state_dict, change(done.state_dict())))
        assert said == "accepted" or repr(done.state_dict()) == before
        return said

    def put(name: str, at: tuple[int, ...], number: int) -> str:
        """What is said of a state with another number in one place of an array."""

        def change(state: Any) -> Any:
            state[name][at] = number
            return state

        return loaded(change)

    def windowed(record: Tensor) -> str:
        return loaded(lambda state: state | {"records": 1, "window": [record], "deciding": True})

    def pending(*, dropped: bool) -> str:
        """What is said between a backward pass and its step."""
        spread = _made(world, one)
        _backward(world, one, spread, 0)
        if dropped:
            spread.zero_grad(set_to_none=False)
        return loaded(lambda state: state, _rebalancing(spread))

    def adafactor(spread: ExpertParallelModel) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(spread.parameters())

    record = torch.ones(table.shape[0], EXPERTS, world.size, dtype=torch.int64)
    (device, slot), *_ = np.argwhere(np.vectorize(lambda expert: (table[2] == expert).sum() == 1)(table[2])).tolist()
    alone = int(table[2, device, slot])  # no other device of layer 2 holds it

    def cast() -> None:
        spread = _made(world, replace(run, beside="autocast"))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(spread, ignored_params=set(expert_parameters(spread)), mp_policy=policy)
        _backward(world, run, spread, 0)

    return {
        "cast": refusal_of(cast),
        "kept": _two_steps(world, run, lambda spread: torch.optim.SGD(spread.parameters(), lr=0.1), beside="kept"),
        "let go": _two_steps(world, run, lambda spread: torch.optim.SGD(spread.parameters(), lr=0.1), beside="let go"),
        "nobody": _two_steps(world, run, lambda spread: torch.optim.AdamW(_dense(spread))),
        "Adafactor": _two_steps(world, run, lambda spread: torch.optim.Adafactor(spread.parameters())),
        "Lamb": _two_steps(world, run, lambda spread: Lamb([*spread.parameters()])),
        "Lars": _two_steps(world, run, lambda spread: Lars(spread.parameters(), lr=0.1)),
        "Named": _two_steps(world, run, lambda spread: Named(spread.parameters(), lr=0.1)),
        "SGD": _two_steps(world, run, lambda spread: torch.optim.SGD(spread.parameters(), lr=0.1)),
        "at once": _two_steps(world, replace(run, rule=None, trigger=1e8), adafactor),
        "stays": _two_steps(world, replace(run, rule=None, trigger=1e9), adafactor),
        "at once, schedule": _two_steps(world, one, adafactor, schedule={99: table[:, ::-1]}),
        "owners stay": _two_steps(world, one, adafactor, schedule={}),
        "shape": scheduled({3: table[:, :, :-1]}),
        "absent": scheduled({0: table, 4: lacking}),
        "other": scheduled({1: other}),
        "words": scheduled({"a": table}),
        "ragged": scheduled({0: [[1, 2], [3]]}),
        "no rebalancing": scheduled({0: table}, plain),
        "paper": scheduled(None, by_paper(one.plan(world.size))),
        "no memory": refusal_of(partial(_made, world, replace(one, memory="swapped"))),  # type: ignore[arg-type]
        "other memory": refusal_of(partial(_made, world, replace(one, memory=get_args(ReplicaMemory)[world.rank]))),
        "no moves": refusal_of(partial(_made, world, replace(one, moves_per_step=0))),
        "half a move": refusal_of(partial(_made, world, replace(one, moves_per_step=math.nan))),  # type: ignore[arg-type]
        "no state": loaded(lambda _state: {}),
        "other sizes": loaded(lambda state: state | {"tables": state["tables"][:, :, :-1]}),
        "other state": loaded(lambda state: state | {"step": world.rank}),
        "other here": loaded(lambda state: state | {"step": -world.rank}),
        "no step": loaded(lambda state: state | {"step": None}),
        "moved": loaded(lambda state: state | {"moved": -1}),
        "nothing to decide by": loaded(lambda state: state | {"deciding": True}),
        "no time": loaded(lambda state: state | {"planning_s": math.nan}),
        "no window": loaded(lambda state: state | {"window": None}),
        "balance": loaded(lambda state: state | {"balance": state["balance"][:-1]}),
        "operations": loaded(lambda state: state | {"operations": [(1, 2)]}),
        "owner": put("owners", (1, 3), world.size),
        "owner without": put("owners", (2, alone), 1 - device),
        "expert": put("tables", (0, 0, 0), EXPERTS),
        "left out": put("decided_last", (2, device, slot), -1),
        "window": windowed(-record),
        "window of others": windowed(record[:, :-1]),
        "window of shares": windowed(record / 2),
        "a window": windowed(record),
        "nothing comes": loaded(lambda state: state | {"coming": [1]}),
        "what comes": loaded(lambda state: state | {"coming": None}),
        "half comes": loaded(lambda state: state | {"coming": [1.0]}),
        "pending": pending(dropped=False),
        "dropped": pending(dropped=True),
    }


def _frozen(world: World) -> list[tuple[list[tuple[int, int]], int]]:
    """Changes and steps where all experts are frozen, with one optimizer and with two."""
    found = []
    for parts in (1, 2):
        run = Run("adamw", Anything())
        spread = _made(world, run)
        for block in spread.blocks:
            block.requires_grad_(False)
        dense = _dense(spread)
        cut = len(dense) // parts
        optimizers = [torch.optim.AdamW(some) for some in (dense[:cut], dense[cut:]) if some]
        for step in range(4):
            _backward(world, run, spread, step)
            for optimizer in optimizers:
                optimizer.step()
        found.append((_rebalancing(spread).changes, _rebalancing(spread).step))
    return found


def _other_steps(world: World) -> dict[str, list[Any]]:
    """Tables and losses of a training whose optimizer also steps without a forward, or by a closure, or as usual.

    Ranks are in groups besides, of which the last rank has none.
    """
    if world.rank < world.size - 1:
        torch.distributed.new_group([*range(world.size - 1)], use_local_synchronization=True)
    run, found = Run("sgd", Anything()), dict[str, list[Any]]()
    case = run.case(world.size)
    mine = own(case.batches, world.rank)
    for kind in ("usual", "empty", "closure"):
        spread, told = _made(world, run), list[Any]()
        optimizer = torch.optim.SGD(spread.parameters(), lr=0.01)

        def closure(spread: Any = spread, told: list[Any] = told) -> None:
            loss = loss_of(spread(run.tokens(case, len(told), 0)[mine]), case.upstream()[mine]).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            told.append(loss.item())

        for _ in range(8):
            if kind == "closure":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            optimizer.zero_grad()
            if kind == "empty":
                optimizer.step()  # of no gradients, as torch.distributed.checkpoint takes it
            told[-1] = told[-1], _rebalancing(spread).tables.copy(), _rebalancing(spread).changes
        found[kind] = told
    return found


def _two_optimizers(world: World) -> tuple[int, int]:
    """Changes and steps where experts have an optimizer of their own, which steps last."""
    run = Run("adamw", Anything())
    spread = _made(world, run)
    experts = [one for block in spread.blocks for one in block.parameters()]
    optimizers = [torch.optim.Adafactor(_dense(spread)), torch.optim.AdamW(experts)]
    for step in range(4):
        _backward(world, run, spread, step)
        for optimizer in optimizers:
            optimizer.step()
    return len(_rebalancing(spread).changes), _rebalancing(spread).step


def _copied(world: World) -> tuple[bool, bool]:
    """Whether a copy of the model follows nothing, and computes what the model does."""
    run, case = Run("adamw", Anything()), Run().case(world.size)
    spread = _made(world, run)
    other, mine = copy.deepcopy(spread), own(case.batches, world.rank)
    with torch.no_grad():
        same = torch.equal(other(case.tokens()[mine]), spread(case.tokens()[mine]))
    return other.rebalancing is None, same


def _let_go(world: World) -> bool:
    """Whether a rebalancer goes with its model."""
    spread = _made(world, Run("adamw", Anything()))
    here = weakref.ref(_rebalancing(spread))
    del spread
    gc.collect()
    return here() is None


FACTS: dict[str, Callable[[World], Any]] = {
    "resumed": _resumed,
    "resumed between layers": partial(_resumed, moves_per_step=1),
    "replayed": _replayed,
    "replayed from file": _replayed_from_file,
    "memory": _memory,
    "row bytes": _row_bytes,
    "by itself": _by_itself,
    "refused": _refused,
    "frozen": _frozen,
    "two optimizers": _two_optimizers,
    "other steps": _other_steps,
    "copied": _copied,
    "let go": _let_go,
}
