"""Routed blocks of a model, and the stacked experts that a device holds of them.

Legend: E experts.
"""

from dataclasses import dataclass

from torch import nn

from ...errors import UsageError


@dataclass(frozen=True, slots=True)
class RoutedBlock:
    """A block whose `experts` are called as `experts(x_TM, ids_TK, weights_TK)`."""

    name: str  #: Of the block in the model, "" for the model itself
    module: nn.Module
    num_experts: int
    top_k: int | None  #: None where its router does not say

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
        if num_experts := _stacked_experts(getattr(module, "experts", None)):
            router = getattr(module, "router", None) or getattr(module, "gate", None)
            blocks.append(RoutedBlock(name, module, num_experts, getattr(router, "top_k", None)))
    if not blocks:
        raise UsageError(
            f"{type(model).__name__} has no routed blocks (a router beside `experts` with stacked weights, as in"
            " transformers 5), or was parallelized before; give a whole Mixture-of-Experts model"
        )
    return blocks


def keep_experts(experts: nn.Module, held: list[int]) -> None:
    """Drop from the stacked parameters of `experts` all but those `held`, in this order; the memory is freed."""
    for name, stacked in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(stacked.detach()[held], requires_grad=stacked.requires_grad))


def _stacked_experts(module: object) -> int:
    """E, where a module holds nothing but stacked weights `[E, ...]` of all experts of a layer; else 0."""
    if not isinstance(module, nn.Module):
        return 0
    lengths = {len(parameter) if parameter.ndim else 0 for parameter in module.parameters()}
    own = list(module.parameters(recurse=False))
    whole = len(lengths) == 1 and len(own) == len(list(module.parameters())) and any(p.ndim == 3 for p in own)
    return lengths.pop() if whole else 0
