"""The routed blocks of a model: every module with a router and stacked experts, in the order of the layers."""

from dataclasses import dataclass

from torch import nn

from ...errors import UsageError
from .experts import stacked_experts

__all__ = ["RoutedBlock", "routed_blocks"]


@dataclass(frozen=True, slots=True)
class RoutedBlock:
    """A block whose `experts` are called as `experts(x_TM, ids_TK, weights_TK)`.

    Parameters
    ----------
    name
        Of the block in the model, "" for the model itself.
    top_k
        None where its router does not say.
    """

    name: str
    module: nn.Module
    num_experts: int
    top_k: int | None

    @property
    def experts(self) -> nn.Module:
        """The module of its experts."""
        experts: nn.Module = self.module.get_submodule("experts")
        return experts

    @property
    def experts_name(self) -> str:
        """The path of its experts in the model."""
        return f"{self.name}.experts" if self.name else "experts"


def routed_blocks(model: nn.Module) -> list[RoutedBlock]:
    """The routed blocks of a model.

    Raises
    ------
    UsageError
        There are none, or it was parallelized before.
    """
    blocks = []
    for name, module in model.named_modules():
        if num_experts := stacked_experts(getattr(module, "experts", None)):
            router = getattr(module, "router", None) or getattr(module, "gate", None)
            blocks.append(RoutedBlock(name, module, num_experts, getattr(router, "top_k", None)))
    if not blocks:
        raise UsageError(
            f"{type(model).__name__} has no routed blocks (a router beside `experts` with stacked weights, as in"
            " transformers 5), or was parallelized before; give a whole Mixture-of-Experts model"
        )
    return blocks
