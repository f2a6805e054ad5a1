"""Layouts whose devices hold no more than a share of a layer's tokens.

Legend: E experts; D devices, S slots of each.
"""

import time

import numpy as np

from ...errors import UsageError
from ..arrays import Floats, Ints
from ..outcome import ROUNDING
from .ilp import solved
from .programme import Layout


def cap_of(loads: Floats, slots: Ints, max_load: float) -> Floats:
    """The most load that a device may hold in each layer `[L]`: so many times the mean of devices that have slots."""
    return np.asarray(max_load * (1 + ROUNDING) * loads.sum(axis=1) / np.count_nonzero(slots))


def capped_layout(loads: Floats, slots: Ints, max_load: float, *, time_limit_s: float) -> tuple[Layout, Floats, bool]:
    """A layout within the cap, the most load that a device may hold in each layer `[L]`, and whether time ended it.

    Parameters
    ----------
    loads
        `[L, E]`.
    max_load
        The cap on a device's load, over the mean of devices that have slots.
    time_limit_s
        Seconds for the integer programme, which decides where swapping does not get there.

    Raises
    ------
    UsageError
        No layout keeps the cap, or none was found; with the smallest cap that was.
    """
    deadline = time.perf_counter() + time_limit_s
    cap_L, layout = cap_of(loads, slots, max_load), [_even(load_E, slots) for load_E in loads]
    worst, tightest, proven, hurried = 1.0, 0, True, False  # the worst layer's load over its cap, and which
    most_L = np.array([_highest(load_E, device_E, slots) for load_E, device_E in zip(loads, layout, strict=True)])
    ratio_L = np.divide(most_L, cap_L, out=np.zeros_like(cap_L), where=cap_L > 0)
    for layer in np.argsort(-ratio_L, kind="stable"):
        if ratio_L[layer] <= worst:
            break
        layout[layer], sure = _evenest(loads[layer], slots, layout[layer], worst * cap_L[layer], deadline)
        hurried |= not sure
        if (ratio := _highest(loads[layer], layout[layer], slots) / cap_L[layer]) > worst:
            worst, tightest, proven = ratio, int(layer), sure
    if worst > 1:
        least = np.ceil(worst * max_load * 1e4) / 1e4
        give = f"give {least:.4f} or more, the smallest that"
        said = (
            f"layer {tightest} cannot be that even; {give} any placement keeps"
            if proven
            else f"no placement of layer {tightest} was found that even; {give} was; more --time-limit may find less"
        )
        raise UsageError(f"max load {max_load:g}: {said}")
    return layout, cap_L, hurried


def evened(load_E: Floats, device_E: Ints, num_devices: int, *, cap: float = 0.0) -> Ints:
    """A layer's homes after swaps out of the most loaded device, until none holds more than a cap or none helps."""
    device_E, held_D = device_E.copy(), np.bincount(device_E, load_E, num_devices)
    while held_D.max() > cap:
        top = int(held_D.argmax())
        mine, others = np.flatnonzero(device_E == top), np.flatnonzero(device_E != top)
        shift = load_E[mine, None] - load_E[others]
        after = np.maximum(held_D[top] - shift, held_D[device_E[others]] + shift)
        if not after.size or after.min() >= held_D[top] * (1 - 1e-12):
            break
        i, j = np.unravel_index(after.argmin(), after.shape)
        other = int(device_E[others[j]])
        held_D[top] -= shift[i, j]
        held_D[other] += shift[i, j]
        device_E[mine[i]], device_E[others[j]] = other, top
    return device_E


def _highest(load_E: Floats, device_E: Ints, slots_D: Ints) -> float:
    return float(np.bincount(device_E, load_E, len(slots_D)).max())


def _even(load_E: Floats, slots_D: Ints) -> Ints:
    """Heaviest first onto the least loaded device with room, then swaps out of the most loaded while they help."""
    device_E, free_D, held_D = np.empty(len(load_E), np.int64), slots_D.copy(), np.zeros(len(slots_D))
    for expert in np.argsort(-load_E, kind="stable"):
        device = int(np.where(free_D > 0, held_D, np.inf).argmin())
        device_E[expert] = device
        free_D[device] -= 1
        held_D[device] += load_E[expert]
    return evened(load_E, device_E, len(slots_D))


def _evenest(load_E: Floats, slots_D: Ints, start_E: Ints, enough: float, deadline: float) -> tuple[Ints, bool]:
    """The layout of a layer whose most loaded device holds `enough` or else least (CP-SAT), and whether it is sure."""
    lightest = np.sort(load_E)[: slots_D[slots_D > 0].min() - 1].sum()
    least = max(enough, float(load_E.max() + lightest))  # no device holds less than the heaviest expert's
    if _highest(load_E, start_E, slots_D) <= least:
        return start_E, True
    from ortools.sat.python import cp_model

    model, scale = cp_model.CpModel(), 2.0**30 / max(float(load_E.sum()), 1e-300)
    units_E = np.rint(load_E * scale).astype(np.int64).tolist()
    x = [[model.new_bool_var("") for _ in slots_D] for _ in load_E]
    rounding = int(slots_D.max()) // 2 + 1
    highest = model.new_int_var(int(least * scale) + rounding, sum(units_E) + rounding, "")
    for on_D, home in zip(x, start_E.tolist(), strict=True):
        model.add_exactly_one(on_D)
        for device, on in enumerate(on_D):
            model.add_hint(on, device == home)
    for device, slots in enumerate(slots_D.tolist()):
        model.add(sum(on_D[device] for on_D in x) <= slots)
        model.add(sum(unit * on_D[device] for unit, on_D in zip(units_E, x, strict=True)) <= highest)
    model.minimize(highest)
    found = solved(model, time_limit_s=max(deadline - time.perf_counter(), 0.01))
    if found.interrupted:
        raise KeyboardInterrupt
    if found.solver is None:
        return start_E, False
    return np.array([[found.solver.value(on) for on in on_D] for on_D in x]).argmax(axis=1), found.proven
