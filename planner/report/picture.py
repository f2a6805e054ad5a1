"""A plan's placement as lines of text.

Legend: E experts; D devices.
"""

import textwrap
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ...runtime.plan import Plan

__all__ = ["placement_picture"]

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def placement_picture(plan: Plan, width: int) -> Iterable[str]:
    """Where experts live: one sign an expert where each has one device, else the experts of every device."""
    placement = plan.placement
    if placement is None:
        return
    if placement.has_replicas:
        yield f"device: its experts ({placement.num_devices} devices)"
    else:
        yield f"column = expert, sign = device ({placement.num_devices} devices)"
    for layer in range(placement.num_layers):
        held_ED = placement.holds(layer)
        text = _listed(held_ED) if placement.has_replicas else _signs(held_ED)
        wrapped = textwrap.wrap(text, max(width - 12, 16), break_on_hyphens=False)
        for row, line in enumerate(wrapped):
            yield f"{f'layer {layer}' if row == 0 else '':<10}  {line}"


def _signs(held_ED: NDArray[np.bool_]) -> str:
    return "".join(DIGITS[device % len(DIGITS)] for device in held_ED.argmax(axis=1).tolist())


def _listed(held_ED: NDArray[np.bool_]) -> str:
    held = (",".join(map(str, np.flatnonzero(column))) for column in held_ED.T)
    return "  ".join(f"{device}:{experts}" for device, experts in enumerate(held))
