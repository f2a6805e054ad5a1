"""Slots that a balance problem may use, and experts that a device must hold, in every layer.

Legend: D devices, S slots of each; E experts; p slots.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ..arrays import Bools, Floats, Ints
from ..placement import slots_for

__all__ = ["live_slots", "pinned", "with_pins"]


def live_slots(
    num_experts: int, num_devices: int, slots: int | Sequence[int] | NDArray[np.integer] | None, dead: Collection[int]
) -> Ints:
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


def pinned(pins: Iterable[tuple[int, int]], num_experts: int, slots: Ints) -> Bools:
    """Whether a device must hold an expert, `[D, E]`, from pairs (expert, device).

    Raises
    ------
    UsageError
        A pin of no expert or device, or more of them than slots.
    """
    pinned_DE = np.zeros((len(slots), num_experts), dtype=np.bool_)
    for expert, device in pins:
        if not (0 <= expert < num_experts and 0 <= device < len(slots)):
            raise UsageError(
                f"pin {expert}@{device}: expected EXPERT@DEVICE with experts 0 to {num_experts - 1} and devices 0 to"
                f" {len(slots) - 1}"
            )
        if not slots[device]:
            raise UsageError(f"pin {expert}@{device}: device {device} has no slots; expected one that is in use")
        pinned_DE[device, expert] = True
    pins_D, needed = pinned_DE.sum(axis=1), int(np.maximum(pinned_DE.sum(axis=0), 1).sum())
    if len(over := np.flatnonzero(pins_D > slots)):
        device = over[0]
        raise UsageError(
            f"{pins_D[device]} experts pinned on device {device}; expected at most its {slots[device]} slots"
        )
    if needed > slots.sum():
        raise UsageError(
            f"pins and experts need {needed} slots of {slots.sum()}; expected fewer pins, or more slots (--slots)"
        )
    return pinned_DE


def with_pins(table: Ints, load: Floats, slots: Ints, pinned: Bools) -> Ints:
    """The experts of every row, device by device, ascending `[R, p]`, changed to hold what is pinned `[R, D, E]`."""
    if not pinned.any():
        return table
    device_p = np.repeat(np.arange(len(slots)), slots)
    found = np.empty_like(table)
    for row, pinned_DE in enumerate(pinned):
        held_DE = np.zeros(pinned_DE.shape, dtype=np.bool_)
        held_DE[device_p, table[row]] = True
        for device, expert in np.argwhere(pinned_DE):
            if not held_DE[device, expert]:
                _pin(held_DE, load[row], pinned_DE, device, expert)
        found[row] = np.nonzero(held_DE)[1]
    return found


def _pin(held_DE: Bools, load_E: Floats, pinned_DE: Bools, device: int, expert: int) -> None:
    """Give a device an expert for another one, in place: by a swap with one that may lose it, else a replica's slot.

    There is such a slot, because all that is needed fits: an expert has more replicas than pins and one.
    """
    share_E = load_E / held_DE.sum(axis=0)
    loose_DE = held_DE & ~pinned_DE
    given_E = loose_DE[device]  # what the device may lose
    swap_DE = loose_DE[:, expert, None] & given_E & ~held_DE
    if swap_DE.any():
        other, lost = _nearest(swap_DE, share_E, share_E[expert])
        held_DE[other, [expert, lost]] = False, True
    else:
        spare_E = held_DE.sum(axis=0) > np.maximum(pinned_DE.sum(axis=0), 1)
        if (given_E & spare_E).any():
            lost = int(np.where(given_E & spare_E, share_E, np.inf).argmin())
        else:
            lacking_D1 = (given_E & ~held_DE).any(axis=1, keepdims=True)
            if not (loose_DE & spare_E & lacking_D1).any():  # an expert that may go has to be elsewhere too: first that
                _pin(held_DE, load_E, pinned_DE, *np.argwhere(pinned_DE & ~held_DE & given_E)[0].tolist())
                if not held_DE[device, expert]:
                    _pin(held_DE, load_E, pinned_DE, device, expert)
                return
            other, replica = _nearest(loose_DE & spare_E & lacking_D1, share_E, 0.0)
            lost = int(np.where(given_E & ~held_DE[other], share_E, np.inf).argmin())
            held_DE[other, [replica, lost]] = False, True
    held_DE[device, [expert, lost]] = True, False


def _nearest(allowed_DE: Bools, share_E: Floats, wanted: float) -> tuple[int, int]:
    """The allowed device and expert whose replica's load is nearest to a wanted one."""
    off_DE = np.where(allowed_DE, np.abs(share_E - wanted), np.inf)
    device, expert = np.unravel_index(off_DE.argmin(), off_DE.shape)
    return int(device), int(expert)
