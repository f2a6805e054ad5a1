"""The slots that a balance problem may use: of devices that are not dead.

Legend: E experts; D devices, S slots of each.
"""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ..placement import slots_for

__all__ = ["live_slots"]


def live_slots(
    num_experts: int,
    num_devices: int,
    slots: int | Sequence[int] | NDArray[np.integer] | None,
    dead: Collection[int],
) -> NDArray[np.int64]:
    """The slots of every device `[D]`, none on dead ones; by default as many on each other as hold all experts.

    Raises
    ------
    UsageError
        A dead device that there is not; slots that cannot hold the experts.
    """
    if unknown := sorted(set(dead) - set(range(num_devices))):
        raise UsageError(f"dead device {unknown[0]} of {num_devices} devices; expected 0 to {num_devices - 1}")
    if not dead:
        return slots_for(num_experts, num_devices, slots)
    alive = num_devices - len(set(dead))
    if not alive:
        raise UsageError(f"all {num_devices} devices are dead; expected one at least that holds experts")
    slots_D = slots_for(num_experts, num_devices, -(-num_experts // alive) if slots is None else slots)
    slots_D[list(dead)] = 0
    if slots_D.sum() < num_experts:
        raise UsageError(
            f"{slots_D.sum()} slots on {alive} devices that are not dead for {num_experts} experts; expected at least"
            f" {-(-num_experts // alive)} a device (--slots)"
        )
    return slots_D
