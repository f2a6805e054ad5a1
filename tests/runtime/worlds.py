"""What tests of ranks share: worlds, samples, refusals, watched routers, how near is equal, what is alive."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from moeplan.errors import MoeplanError
from moeplan.planner.demo.model import Router
from moeplan.profilers.world import run_world

ROUTERS = ("moe.router", "mlp.router", "mlp.gate")


def by_rank(num_ranks: int, target: Callable[..., Any], payload: Any = None, *, timeout_s: float = 120) -> list[Any]:
    """What every rank of a world answers."""
    answers = run_world(num_ranks, target, payload, timeout_s=timeout_s)
    assert answers is not None
    return answers


def by_case(num_ranks: int, target: Callable[..., Any], cases: Sequence[Any]) -> list[list[Any]]:
    """Answers by case, then rank, of a target that answers with one item a case."""
    return [list(ranks) for ranks in zip(*by_rank(num_ranks, target, cases), strict=True)]


def own(batches: Sequence[int], rank: int) -> slice:
    """The samples of a rank among those of all."""
    return slice(sum(batches[:rank]), sum(batches[: rank + 1]))


def refusal_of(attempt: Callable[[], object]) -> str:
    """The kind and the message of our error, "accepted" where there is none."""
    try:
        attempt()
    except MoeplanError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def close(actual: Any, expected: Any, rtol: float = 1e-12) -> bool:
    """Whether shapes are equal, and values up to rounding of the largest."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    difference = np.abs(actual - expected).max(initial=0) if actual.shape == expected.shape else np.inf
    return bool(difference <= rtol * np.abs(expected).max(initial=1e-300))


def summed(found: Sequence[Any], name: str) -> np.ndarray:
    """The gradient of a parameter over ranks with their `gradients` and the experts they own: of experts, in order."""
    parts = [rank.gradients[name] for rank in found if name in rank.gradients]
    if ".experts." not in name:
        return np.sum(parts, axis=0)  # type: ignore[no-any-return]
    owned = [rank.owned[int(name.split(".")[1])] for rank in found]
    total = np.empty((sum(map(len, owned)), *parts[0].shape[1:]))
    for rank, experts in zip(found, owned, strict=True):
        total[experts] = rank.gradients[name]
    return total


class Watched:
    """The experts that a model's routers choose, call by call, and the least gap between gates down to the next one."""

    def __init__(self, model: nn.Module) -> None:
        self.ids, self.gap = list[torch.Tensor](), float("inf")
        for name, module in model.named_modules():
            if name.endswith(ROUTERS) and not list(module.children())[1:]:
                module.register_forward_hook(self._see)

    def _see(self, router: nn.Module, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
        self.ids.append(output[-1])
        if isinstance(router, Router):
            gates = router.gate(inputs[0]).detach().sort(descending=True).values
            gaps = -gates[:, : output[-1].shape[1] + 1].diff(dim=1)
            self.gap = min([self.gap, *gaps.flatten().tolist()])


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations made and nobody has freed yet."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor.untyped_storage())
        return result

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size
