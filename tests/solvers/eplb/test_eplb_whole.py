import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import eplb
from moeplan.solvers.placement import keeps_groups_whole

Array = NDArray[Any]


def splits(items: tuple[int, ...], room: int) -> list[list[tuple[int, ...]]]:
    """Every way to deal items to places alike of so many each."""
    if not items:
        return [[]]
    found = []
    for others in itertools.combinations(items[1:], room - 1):
        place = (items[0], *others)
        found += [[place, *rest] for rest in splits(tuple(i for i in items if i not in place), room)]
    return found


def least_max(load: Array, room: int) -> float:
    """The least load of the busiest place, over all ways to deal the experts to places of so much room."""
    return min(max(float(load[list(p)].sum()) for p in way) for way in splits(tuple(range(len(load))), room))


@pytest.mark.parametrize(("devices", "num_groups"), [(2, 4), (3, 6), (4, 4), (4, 2), (6, 2), (12, 4), (12, 12), (1, 4)])
@pytest.mark.parametrize("method", ["refined", "published"])
def test_groups_stay_whole_and_refined_is_as_even_as_that_allows(
    devices: int, num_groups: int, method: Any, rng: np.random.Generator
) -> None:
    loads, size = rng.lognormal(0, 1, (4, 12)), 12 // num_groups
    found = eplb.solve(loads, Cluster(1, devices), num_groups=num_groups, groups="whole", method=method)
    assert keeps_groups_whole(found.placement, num_groups)
    slots, ratios = 12 // devices, []
    for load in loads:
        groups = load.reshape(num_groups, size)
        if slots >= size:
            best = least_max(groups.sum(axis=1), slots // size)
        else:
            best = max(least_max(group, slots) for group in groups)
        ratios.append(best / (load.sum() / devices))
    value = found.outcome.objective.value
    assert value == pytest.approx(np.mean(ratios), rel=1e-4) if method == "refined" else value >= np.mean(ratios) - 1e-9
    assert found.outcome.bound is not None
    assert found.outcome.bound <= value * (1 + 1e-12)


@pytest.mark.parametrize(("devices", "pins"), [(2, [(0, 1), (9, 0)]), (6, [(0, 4), (1, 3), (7, 2)]), (3, [(11, 0)])])
def test_pins_take_whole_groups_along(devices: int, pins: list[tuple[int, int]], rng: np.random.Generator) -> None:
    num_groups = 2 if devices == 6 else 6
    found = eplb.solve(
        rng.lognormal(0, 1, (3, 12)), Cluster(1, devices), num_groups=num_groups, groups="whole", pins=pins
    )
    assert keeps_groups_whole(found.placement, num_groups)
    assert all(found.placement.holds(layer)[pin] for layer in range(3) for pin in pins)


@pytest.mark.parametrize("devices", [2, 8])
def test_steps_keep_groups_whole_too(devices: int, rng: np.random.Generator) -> None:
    steps = rng.lognormal(0, 1, (9, 2, 16))
    found = eplb.solve(steps, Cluster(1, devices), num_groups=4, groups="whole")
    of_mean = eplb.solve(steps.mean(axis=0), Cluster(1, devices), num_groups=4, groups="whole")
    assert keeps_groups_whole(found.placement, 4)
    held = [[one.placement.holds(layer) for layer in range(2)] for one in (found, of_mean)]
    worth = [np.mean([(steps[:, i] @ h[i]).max(axis=1) / steps[:, i].sum(axis=1) for i in range(2)]) for h in held]
    assert found.outcome.objective.value == pytest.approx(worth[0] * devices)
    assert worth[0] <= worth[1] * (1 + 1e-12)
