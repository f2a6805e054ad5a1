"""Training in DistributedDataParallel, FSDP2 and groups smaller than the world: as in one process, or refused."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers load it, each rank for itself where its nursery has not
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.gradients import clip_grad_norm_, expert_parameters
from moeplan.runtime.whole import full_optimizer_state, full_state_dict, keep_held
from tests.runtime.rank_cases import Case
from tests.runtime.worlds import by_rank, close, own, refusal_of

CASES = {
    "even": Case("standard", (4, 4), (2, 3), seed=1, gradients=True),
    "replicas": Case("standard", (6, 7), (2, 2), seed=2, gradients=True, rule="even"),
    "degrees over replicas": Case(
        "standard", (6, 6), (2, 2), gradients=True, rule="even", seed=35, top_k=4, forward=(2, 1, 4), backward=(1, 3, 2)
    ),
    "a device without slots": Case("standard", (0, 8), (2, 2), seed=3, gradients=True),
}
WORK = [(name, "ddp", 1.0) for name in CASES] + [("even", "fsdp", 1.0), ("replicas", "fsdp", 1.0), ("even", "ddp", 1e9)]


STEPS, RELOADED_BEFORE = 4, 2
SAVED = Case("standard", (4, 4), (2, 3), seed=1)
OTHER = replace(SAVED, seed=2)
ON_ONE = replace(SAVED, slots=(0, 8))
Reloaded = tuple[bool, bool, str]


@dataclass
class Trained:
    """What a loop leaves: the norm before each step, the whole model and the whole state of its optimizer."""

    norms: list[float]
    state: dict[str, Tensor]
    optimizer: dict[str, Any]


Left = tuple[list[list[Trained]], list[Reloaded]]


@pytest.fixture(scope="module")
def left() -> Left:
    """What each loop left, by rank; and what became of states of single ranks, by rank."""
    loops, reloaded = zip(*by_rank(2, every, WORK), strict=True)
    return [list(ranks) for ranks in zip(*loops, strict=True)], list(reloaded)


def every(world: World, work: list[tuple[str, str, float]]) -> tuple[list[Trained], Reloaded]:
    return [together(world, CASES[name], wrapper, max_norm) for name, wrapper, max_norm in work], reload()


def alone(case: Case, max_norm: float) -> Trained:
    """The loop in one process; its loss is the mean of the ranks'."""
    model, norms = case.model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        (model(case.tokens()) * case.upstream()).sum().div(len(case.slots)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(norms, model.state_dict(), optimizer.state_dict())


def together(world: World, case: Case, wrapper: str, max_norm: float) -> Trained:
    """The loop on ranks, in "ddp", saved and loaded into another model between, or "fsdp"; what only rank 0 has."""
    mine = own(case.batches, world.rank)
    model, optimizer = _made(case, wrapper)
    norms = []
    for step in range(STEPS):
        if wrapper == "ddp" and step == RELOADED_BEFORE:
            model, optimizer = _reloaded(case, model, optimizer)
        (model(case.tokens()[mine], case.samples()[mine]) * case.upstream()[mine]).sum().backward()
        norms.append(clip_grad_norm_(model, max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(norms, full_state_dict(model), full_optimizer_state(model, optimizer))


def _made(case: Case, wrapper: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = parallelize(case.model(), case.plan(), dispatch="standard")
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, ignored_params=set(expert_parameters(model)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _reloaded(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Another model under another placement, with what a checkpoint on rank 0 held."""
    saved = [full_state_dict(model), full_optimizer_state(model, optimizer)]
    dist.broadcast_object_list(saved)
    model, optimizer = _made(replace(case, seed=case.seed + 1), "ddp")
    inner: Any = model.module
    inner.model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    keep_held(model, optimizer)
    return model, optimizer


def reload() -> Reloaded:
    """Whether a rank's own state fills an empty model, with experts and without, and what it is told elsewhere."""
    saved = parallelize(SAVED.model(), SAVED.plan()).model.state_dict()
    elsewhere = parallelize(SAVED.model(), OTHER.plan()).model
    return fills(SAVED), fills(ON_ONE), refusal_of(lambda: elsewhere.load_state_dict(saved))


def fills(case: Case) -> bool:
    """Whether a state goes into a model of other weights."""
    saved = parallelize(case.model(), case.plan()).model.state_dict()
    model = parallelize(OTHER.model(), case.plan()).model
    model.load_state_dict(saved)
    return all(torch.equal(model.state_dict()[name], value) for name, value in saved.items())


@pytest.mark.parametrize("index", range(len(WORK)), ids=map(str, WORK))
def test_a_loop_over_spread_experts_and_its_optimizer_are_those_of_one_process(index: int, left: Left) -> None:
    name, _, max_norm = WORK[index]
    expected, (whole, other) = alone(CASES[name], max_norm), left[0][index]
    assert whole.norms == other.norms == pytest.approx(expected.norms, rel=1e-10)
    assert list(whole.state) == list(expected.state)
    assert all(close(whole.state[key], value, 1e-9) for key, value in expected.state.items())
    assert not other.state
    assert not other.optimizer
    assert whole.optimizer["param_groups"] == expected.optimizer["param_groups"]
    assert list(whole.optimizer["state"]) == list(expected.optimizer["state"])
    for number, state in expected.optimizer["state"].items():
        assert set(whole.optimizer["state"][number]) == set(state)
        assert all(close(whole.optimizer["state"][number][key], value, 1e-9) for key, value in state.items())


def test_the_state_of_one_rank_is_loaded_under_its_own_placement_only(left: Left) -> None:
    for rank, (filled, filled_on_one, refusal) in enumerate(left[1]):
        saved, here = (", ".join(map(str, case.placement().held(0, rank))) for case in (SAVED, OTHER))
        assert saved != here
        assert filled
        assert filled_on_one
        words = f"layers.0.moe.experts: the state is of experts {saved}, this rank owns {here}; it was saved by"
        assert refusal.startswith(f"MismatchError: {words}")


DRIFT = "UsageError: gradients averaged over 4 ranks beside experts trained by a group of 2, which would drift"
MESH = "UsageError: a device mesh [2, 2] ['dp', 'ep'] as group"
IN_PARTS = "of a model of which fully_shard keeps parameters in parts"
PAIR = Case("standard", (4, 4), (1, 1), seed=3, gradients=True)
FOUR = Case("coherent", (2, 2, 2, 2), (1, 1, 1, 1), seed=4)
Answer = tuple[dict[str, str], dict[str, Tensor]]


def in_groups(world: World, _payload: None) -> Answer:
    """What each attempt was told, "accepted" where nothing, and the tensors that some left."""
    left, mesh = dict[str, Tensor](), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    return {name: refusal_of(attempt) for name, attempt in _attempts(world, mesh, left).items()}, left


def _attempts(world: World, mesh: Any, left: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    place, tokens = world.rank % 2, PAIR.tokens()
    mine = slice(place, place + 1)

    def spread(**how: Any) -> Any:
        return parallelize(PAIR.model(), PAIR.plan(), mesh["ep"], **how)

    def forward(name: str, model: nn.Module, *, trained: bool = True) -> None:
        with torch.set_grad_enabled(trained):
            left[name] = model(tokens[mine])
        if trained:
            left[name].sum().backward()  # type: ignore[no-untyped-call]
        left[name] = left[name].detach()

    def in_world(*, trained: bool = True, freeze: bool = False, inner: bool = False) -> nn.Module:
        model = spread()
        for parameter in expert_parameters(model) if freeze else ():
            parameter.requires_grad_(False)
        return DistributedDataParallel(model.model if inner else model)

    def sharded_over(part: Any) -> None:
        model = spread()
        fully_shard(model, mesh=part, ignored_params=set(expert_parameters(model)))
        forward("sharded", model)
        clip_grad_norm_(model, 1.0)

    return {
        "two dimensions": lambda: parallelize(PAIR.model(), PAIR.plan(), mesh),
        "one dimension": lambda: forward("one dimension", spread()),
        "ddp over the world": lambda: forward("", in_world()),
        "ddp over the world, the model within": lambda: forward("", in_world(inner=True)),
        "ddp over the world, frozen": lambda: forward("", in_world(freeze=True)),
        "ddp over the world, inference": lambda: forward("inference", in_world(), trained=False),
        "ddp over the group": lambda: forward(
            "", DistributedDataParallel(spread(), process_group=mesh.get_group("ep"))
        ),
        "fsdp over the world": lambda: sharded_over(init_device_mesh("cpu", (4,))),
        "fsdp over the group": lambda: sharded_over(mesh["ep"]),
        **_sharded(world, left),
    }


def _sharded(world: World, left: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """Attempts with coherent dispatch over all ranks."""
    tokens = FOUR.tokens()[[world.rank]]

    def made(*, layers: bool) -> Any:
        model: Any = parallelize(FOUR.model(), FOUR.plan(), dispatch="coherent")
        ignored = set(expert_parameters(model))
        for layer in model.model.layers if layers else ():
            fully_shard(layer, ignored_params=ignored)
        fully_shard(model, ignored_params=ignored)
        return model

    def logits(name: str, model: nn.Module) -> None:
        with torch.no_grad():
            left[name] = model(tokens)

    def generate() -> None:
        model = made(layers=False)
        register_fsdp_forward_method(model, "generate")
        left["generated"] = model.generate(tokens, 3)[0]

    return {
        "coherent, layer by layer": lambda: logits("", made(layers=True)),
        "coherent, the whole": lambda: logits("coherent", made(layers=False)),
        "generation, not told": lambda: made(layers=False).generate(tokens, 3),
        "generation, told": generate,
    }


@pytest.fixture(scope="module")
def ranks() -> list[Answer]:
    return by_rank(4, in_groups)


@pytest.mark.parametrize(
    ("attempt", "refusal"),
    [
        ("two dimensions", f"{MESH}; expected one dimension; name one: group=mesh["),
        ("one dimension", "accepted"),
        ("ddp over the world", DRIFT),
        ("ddp over the world, the model within", DRIFT),
        ("ddp over the world, frozen", "accepted"),
        ("ddp over the world, inference", "accepted"),
        ("ddp over the group", "accepted"),
        ("fsdp over the world", DRIFT),
        ("fsdp over the group", "accepted"),
        ("coherent, layer by layer", f"UsageError: coherent dispatch {IN_PARTS}"),
        ("coherent, the whole", "accepted"),
        ("generation, not told", f"UsageError: generation {IN_PARTS}"),
        ("generation, told", "accepted"),
    ],
)
def test_only_what_would_go_wrong_in_a_group_is_refused(attempt: str, refusal: str, ranks: list[Answer]) -> None:
    for refusals, _ in ranks:
        assert refusals[attempt].startswith(refusal)
        assert "\n" not in refusals[attempt]


def test_groups_and_the_whole_model_sharded_give_what_one_process_gives(ranks: list[Answer]) -> None:
    pair, four = PAIR.model()(PAIR.tokens()).detach(), FOUR.model()(FOUR.tokens()).detach()
    for rank, (_, left) in enumerate(ranks):
        torch.testing.assert_close(left["one dimension"], pair[[rank % 2]])
        torch.testing.assert_close(left["inference"], pair[[rank % 2]])
        torch.testing.assert_close(left["coherent"], four[[rank]])
        assert left["generated"][0] == four[rank, -1].argmax()
