"""What the four ranks of a test world do in groups of two, and under FSDP2 layer by layer."""

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # optimizers load it, each rank for itself where its nursery has not
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from moeplan.errors import UsageError
from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.gradients import clip_grad_norm_, expert_parameters
from tests.runtime.rank_cases import Case

PAIR = Case("standard", (4, 4), (1, 1), seed=3, gradients=True)
FOUR = Case("coherent", (2, 2, 2, 2), (1, 1, 1, 1), seed=4)


def in_groups(world: World, _payload: None) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What each attempt was told, "accepted" where nothing, and the tensors that some left."""
    told, left = {}, dict[str, Tensor]()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    for name, attempt in _attempts(world, mesh, left).items():
        try:
            attempt()
            told[name] = "accepted"
        except UsageError as error:
            told[name] = str(error)
    return told, left


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
