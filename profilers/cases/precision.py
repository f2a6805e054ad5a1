"""Dtypes of floating-point cases, and how far rounding may take a right answer from the exact one."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..world import World

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def float_dtypes(device: str) -> tuple[str, ...]:
    """The dtypes of models on a device, the usual one first; no fp16 on CPU, where it multiplies 30 times slower."""
    return ("fp32", "bf16") if device == "cpu" else ("bf16", "fp16", "fp32")


def torch_dtype(dtype: str) -> "torch.dtype":
    """PyTorch's dtype of that name."""
    import torch

    return {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp8": torch.float8_e4m3fn,
        "uint8": torch.uint8,
    }[dtype]


def normal(world: World, dtype: str) -> "Callable[..., Tensor]":
    """A function from a shape to normal values on a rank's device, seeded by the rank."""
    import torch

    generator = torch.Generator(world.device).manual_seed(world.rank)
    return functools.partial(torch.randn, generator=generator, dtype=torch_dtype(dtype), device=world.device)


def deviation(output: "Tensor", exact: "Tensor", *, roundings: int, terms: int) -> str | None:
    """Distance of rows from the exact ones, where it is more than rounding explains; None where it is not.

    Parameters
    ----------
    output, exact
        `[..., M]`, the latter in float64.
    roundings
        Times a value is rounded to the output's dtype on its way.
    terms
        Of the longest sum, which is made in float32 or better.

    Notes
    -----
    A rounding moves a value by at most eps / 2 of itself. Of operands of mixed signs a sum is moved by as large a share
    of its row's largest value, give or take the spread between values, for which a factor of 4 is left; a sum of k
    terms in float32 adds at most k eps_32. Hence, for each row,

        max |output - exact|  <=  (2 roundings eps + terms eps_32) max |exact|                              (1)
    """
    import torch

    rounding = 2 * roundings * torch.finfo(output.dtype).eps + terms * torch.finfo(torch.float32).eps
    error = (output.double() - exact).abs().amax(-1)
    allowed = rounding * exact.abs().amax(-1)
    if bool((error <= allowed).all()):  # (1); false for NaN
        return None
    worst = int((error / allowed).nan_to_num(torch.inf).argmax())
    return f"off by {error.flatten()[worst]:.3g}, expected at most {allowed.flatten()[worst]:.3g}"
