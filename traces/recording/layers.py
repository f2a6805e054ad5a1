"""The modules of a model that show its routing: those called with the chosen experts, or those that choose them."""

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ...errors import UsageError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MoELayer", "hidden_layers", "moe_layers", "routers"]

ROUTER_NAMES = ("router", "gate")
EXPERT_ARGUMENTS = 3  # hidden states, expert ids, gate weights


@dataclass(frozen=True, slots=True)
class MoELayer:
    """A place where the routing of a layer shows.

    Parameters
    ----------
    name
        The module's qualified name.
    at_input
        The chosen ids are among the arguments of `module` (stacked experts); else they are in what it returns.
    block
        The module around router and experts, where it is known.
    """

    name: str
    module: "nn.Module"
    at_input: bool = False
    block: "nn.Module | None" = None


def moe_layers(model: "nn.Module", pattern: str | None = None) -> list[MoELayer]:
    """The MoE layers of a model in its own order: by itself, or the routers that a pattern names.

    Raises UsageError where no module has routed experts, or the pattern fits none.

    Notes
    -----
    A block that holds `experts` is an MoE layer. Experts called with (hidden states, ids, weights), as those of every
    family in transformers 5, show what was really used, after group limits, biases and drops; else the block's `router`
    or `gate` must return ids.
    """
    if pattern is not None:
        return [MoELayer(name, module) for name, module in routers(model, pattern)]
    layers = [layer for name, block in model.named_modules() if (layer := _layer_of(name, block)) is not None]
    if not layers:
        raise UsageError(
            f"{type(model).__name__} has no MoE layer that is known (a block with `experts` called with expert ids, or"
            " beside a `router` or `gate`); if it has others, give a pattern for the names of its routers (pattern=,"
            f" or --router of the command line){_suggestion(model)}"
        )
    return layers


def routers(model: "nn.Module", pattern: str) -> list[tuple[str, "nn.Module"]]:
    """The modules whose whole qualified name matches a regular expression, in the model's own order.

    Of a model that is wrapped for data parallelism, names may be given as the model inside has them.

    Raises UsageError where the pattern is no regular expression or matches no module.
    """
    around = "module." if [name for name, _ in model.named_children()] == ["module"] else ""
    try:
        matches = [
            (name, module)
            for name, module in model.named_modules()
            if re.fullmatch(pattern, name) or re.fullmatch(pattern, name.removeprefix(around))
        ]
    except re.error as error:
        raise UsageError(
            rf"router pattern {pattern!r} is no regular expression ({error}); expected one such as .*\.mlp\.router"
        ) from error
    if not matches:
        raise UsageError(f"router pattern {pattern!r} matches no module{_suggestion(model)}")
    return matches


def hidden_layers(layers: Sequence[MoELayer]) -> tuple[int, ...]:
    """The hidden layer of each MoE layer: the last number in its name; their ordinals where those do not ascend."""
    numbers = [re.findall(r"(?<![^.])\d+(?![^.])", layer.name) for layer in layers]
    ids = tuple(int(number[-1]) if number else -1 for number in numbers)
    ascending = ids[0] >= 0 and all(a < b for a, b in pairwise(ids))
    return ids if ascending else tuple(range(len(layers)))


def _layer_of(name: str, block: "nn.Module") -> MoELayer | None:
    children = dict(block.named_children())
    if (experts := children.get("experts")) is None:
        return None
    if len(inspect.signature(experts.forward).parameters) >= EXPERT_ARGUMENTS:
        return MoELayer(_joined(name, "experts"), experts, at_input=True, block=block)
    router = next((child for child in ROUTER_NAMES if child in children), None)
    return None if router is None else MoELayer(_joined(name, router), children[router], block=block)


def _joined(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _suggestion(model: "nn.Module") -> str:
    some = [name for name, _ in model.named_modules() if re.search("rout|gate", name)][:3]
    return f"; names that may be meant: {', '.join(some) or 'none'}"
