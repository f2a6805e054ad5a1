"""Rows: the parts of a balance problem that are solved alone, one a layer and node; their bound and their refinement.

And the slots that a problem may use, and experts pinned: those that a device must hold, in every layer.

Legend: L MoE layers; E experts per layer; D devices; N nodes (1 in the global form); Q groups; R rows of e = E / N
experts and p slots on G = D / N devices.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ..arrays import Bools, Floats, Ints
from ..placement import Placement, ReplicaRule, slots_for

WORK, LEAST_WORK = 4000, 200_000  # a slot, some 70 ms of a core for 58 layers of 288; and a row
NEAR = 1e-5  # a maximum so close to what bounds it, relatively, is good enough


def lowest_max(load: Floats, slots: Ints) -> Floats:
    """The mean device load of rows, or the least that the largest replica can have, if that is more, `[R]`.

    Giving every surplus slot to the expert with the highest load a replica, as long as it has fewer than there are
    devices, makes the largest replica smallest.
    """
    row_R, used = np.arange(len(load)), int(np.count_nonzero(slots))
    replica_Re, count_Re = load.copy(), np.ones(load.shape)
    for _ in range(int(slots.sum()) - load.shape[1]):
        chosen_R = replica_Re.argmax(axis=1)
        count_R = np.minimum(count_Re[row_R, chosen_R] + 1, used)
        count_Re[row_R, chosen_R] = count_R
        replica_Re[row_R, chosen_R] = load[row_R, chosen_R] / count_R
    return np.asarray(np.maximum(load.sum(axis=1) / used, replica_Re.max(axis=1)))


@dataclass(frozen=True, slots=True)
class Rows:
    """Experts to be placed with replicas on devices, row by row."""

    load: Floats  #: `[R, e]`
    member: Ints  #: The experts of every row, ascending, `[R, e]`
    slots: Ints  #: S of every device of a row, `[G]`
    pinned: Bools  #: Whether a device of a row must hold an expert of it, `[R, G, e]`

    @classmethod
    def of(cls, loads: Floats, slots: Ints, pinned: Bools, groups: Ints | None) -> "Rows":
        """The rows of layers and nodes.

        Parameters
        ----------
        loads, slots, pinned
            `[L, E]`, `[D]` and `[D, E]`.
        groups
            The groups of every node, ascending, `[L, N, Q / N]`; None: one row a layer.
        """
        num_layers, num_experts = loads.shape
        if groups is None:
            member_LE = np.tile(np.arange(num_experts), (num_layers, 1))
            return cls(loads, member_LE, slots, np.broadcast_to(pinned, (num_layers, *pinned.shape)))
        num_nodes, size = groups.shape[1], num_experts // (groups.shape[1] * groups.shape[2])
        member_Re = (groups[..., None] * size + np.arange(size)).reshape(num_layers * num_nodes, -1)
        load_Re = loads[np.arange(num_layers).repeat(num_nodes)[:, None], member_Re]
        pinned_NGE = pinned.reshape(num_nodes, -1, num_experts)
        pinned_RGe = [pinned_NGE[row % num_nodes][:, member_e] for row, member_e in enumerate(member_Re)]
        return cls(load_Re, member_Re, slots[: len(slots) // num_nodes], np.array(pinned_RGe))

    def placement(self, table: NDArray[np.integer], num_layers: int) -> Placement:
        """The placement of rows whose experts stand device by device, ascending, `[R, p]`."""
        num_nodes = len(table) // num_layers
        logical_LP = np.take_along_axis(self.member, table, axis=1).reshape(num_layers, -1)
        num_experts = self.member.shape[1] * num_nodes
        return Placement(logical_LP.astype(np.int32), np.tile(self.slots, num_nodes), num_experts, ReplicaRule.EVEN)


def has_form(slots: Ints, pinned: Bools, num_nodes: int, num_groups: int | None) -> bool:
    """Check whether whole groups go on nodes: of equal slots, no more a device than its experts, as pins allow."""
    num_experts = pinned.shape[1]
    if num_groups is None or num_nodes == 1 or num_groups % num_nodes or num_experts % num_groups:
        return False
    slots_NG = slots.reshape(num_nodes, -1)
    pinned_NQ = pinned_groups(pinned, num_nodes, num_groups)
    return bool(
        (slots_NG == slots_NG[0]).all()
        and slots.max() * num_nodes <= num_experts
        and (pinned_NQ.sum(axis=0) <= 1).all()
        and (pinned_NQ.sum(axis=1) <= num_groups // num_nodes).all()
        and _needed(pinned, num_nodes) <= slots_NG[0].sum()
    )


def pinned_groups(pinned: Bools, num_nodes: int, num_groups: int) -> Bools:
    """Mask of groups that a node must hold because of their pinned experts, `[N, Q]`."""
    return np.asarray(pinned.reshape(num_nodes, len(pinned) // num_nodes, num_groups, -1).any(axis=(1, 3)))


def _needed(pinned: Bools, num_nodes: int) -> int:
    """The most slots that a node needs for its experts and their pins."""
    pins_NE = pinned.reshape(num_nodes, -1, pinned.shape[1]).sum(axis=1)
    return int(pinned.shape[1]) // num_nodes + int(np.maximum(pins_NE - 1, 0).sum(axis=1).max())


def refined(rows: Rows, table: Ints, num_layers: int, least_work: int = LEAST_WORK) -> Ints:
    """Rows whose busiest devices hold no more than in a legal table `[R, p]`, experts ascending on devices.

    No node of a layer needs to be better than the best that another can be. `least_work` is that of a row.
    """
    from .kernel import refine

    num_slots, num_experts = table.shape[1], rows.load.shape[1]
    least_LN = lowest_max(rows.load, rows.slots).reshape(num_layers, -1)
    target_R = np.repeat(least_LN.max(axis=1), least_LN.shape[1]) * (1 + NEAR)
    first = np.concatenate([[0], np.cumsum(rows.slots)])
    work = max(WORK * num_slots, least_work)
    better_Rp = refine(rows.load, table, first, np.ascontiguousarray(rows.pinned), target_R, work)
    device_p = np.repeat(np.arange(len(rows.slots)), rows.slots)
    return np.asarray(np.sort(better_Rp + device_p * num_experts, axis=1) % num_experts)


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
    """Mask of experts that a device must hold, `[D, E]`, from pairs (expert, device).

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
