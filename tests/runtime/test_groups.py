"""Groups smaller than the world, device meshes, and FSDP2 layer by layer: right, or refused in one line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers load it, each rank for itself where its nursery has not
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.gradients import clip_grad_norm_, expert_parameters
from tests.runtime.rank_cases import Case
from tests.runtime.worlds import by_rank, refusal_of

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
def test_what_would_go_wrong_in_a_group_is_refused_on_every_rank_and_nothing_else(
    attempt: str, refusal: str, ranks: list[Answer]
) -> None:
    for refusals, _ in ranks:
        assert refusals[attempt].startswith(refusal)
        assert "\n" not in refusals[attempt]


@pytest.mark.parametrize("name", ["one dimension", "inference"])
def test_each_group_gives_what_one_process_gives(name: str, ranks: list[Answer]) -> None:
    expected = PAIR.model()(PAIR.tokens()).detach()
    for rank, (_, left) in enumerate(ranks):
        torch.testing.assert_close(left[name], expected[[rank % 2]])


def test_the_whole_model_sharded_gives_what_one_process_gives(ranks: list[Answer]) -> None:
    expected = FOUR.model()(FOUR.tokens())
    for rank, (_, left) in enumerate(ranks):
        torch.testing.assert_close(left["coherent"], expected[[rank]].detach())
        assert left["generated"][0] == expected[rank, -1].argmax()
