from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import UsageError
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import eplb


@settings(max_examples=150)
@given(st.data())
def test_whatever_pins_fit_are_kept(data: st.DataObject) -> None:
    num_experts, num_devices = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    slots = data.draw(st.lists(st.integers(0, num_experts), min_size=num_devices, max_size=num_devices))
    if sum(slots) < num_experts:
        slots[0] = num_experts
    cells = [(e, d) for e in range(num_experts) for d in range(num_devices)]
    pins = data.draw(st.sets(st.sampled_from(cells), max_size=sum(slots)))
    pins_of_expert = [sum(e == expert for e, _ in pins) for expert in range(num_experts)]
    fits = all(sum(d == device for _, d in pins) <= slots[device] for device in range(num_devices))
    fits = fits and sum(max(1, pins) for pins in pins_of_expert) <= sum(slots)
    loads = np.array([data.draw(st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts))])

    def solved() -> Any:
        return eplb.solve(loads, Cluster(1, num_devices), slots=slots, pins=pins, method="published").placement

    if fits:
        held = solved().holds(0)
        assert all(held[pin] for pin in pins)
    else:
        with pytest.raises(UsageError, match="pin"):
            solved()


@pytest.mark.parametrize(
    ("slots", "pins", "num_experts"),
    [
        ([2, 3, 1], [(1, 1), (1, 2), (2, 0), (0, 0)], 3),  # a spare replica is where nothing can go
        ([3, 2, 0, 3], [(0, 0), (3, 1), (1, 1), (2, 0), (2, 3), (3, 3), (1, 0)], 4),
        ([2, 1, 4], [(0, 0), (4, 2), (3, 0), (3, 2), (4, 1)], 5),
    ],
)
@pytest.mark.parametrize("seed", range(8))
def test_pins_that_leave_a_device_nothing_to_give_away_are_kept(
    slots: list[int], pins: list[tuple[int, int]], num_experts: int, seed: int
) -> None:
    loads = np.random.default_rng(seed).integers(0, 3, (20, num_experts))
    placement = eplb.solve(loads, Cluster(1, len(slots)), slots=slots, pins=pins, method="published").placement
    for layer in range(len(loads)):
        held = placement.holds(layer)
        assert held.sum() == sum(slots)
        assert all(held[pin] for pin in pins)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pins": [(8, 0)]}, "pin 8@0: expected EXPERT@DEVICE with experts 0 to 7 and devices 0 to 3"),
        ({"pins": [(0, 4)]}, "pin 0@4"),
        ({"pins": [(-1, 0)]}, "pin -1@0"),
        ({"pins": [(0, 2)], "dead": [2], "slots": 3}, "pin 0@2: device 2 has no slots"),
        ({"pins": [(e, 1) for e in range(3)]}, "3 experts pinned on device 1; expected at most its 2 slots"),
        ({"pins": [(0, 0), (0, 1)]}, "pins and experts need 9 slots of 8"),
        ({"dead": [4]}, "dead device 4 of 4 devices"),
        ({"dead": [0, 1, 2, 3]}, "all 4 devices are dead"),
        ({"dead": [1], "slots": 2}, "6 slots on 3 devices that are not dead for 8 experts; expected at least 3"),
        ({"dead": [1], "slots": [2, 8, 2, 2]}, "6 slots on 3 devices"),
        ({"groups": "whole"}, "without expert groups"),
        ({"groups": "whole", "num_groups": 3}, "8 experts in 3 groups"),
        ({"groups": "whole", "num_groups": 4, "slots": 3}, "12 slots, 3 to 3 a device"),
        ({"groups": "whole", "num_groups": 4, "dead": [0]}, "0 to 3 a device"),
        ({"groups": "whole", "num_groups": 4, "pins": [(0, 0), (1, 1)]}, "pins need an expert group in two places"),
        ({"groups": "whole", "num_groups": 2, "pins": [(0, 0), (1, 3)]}, "pins need an expert group in two places"),
    ],
    ids=str,
)
def test_what_cannot_be_kept_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        eplb.solve(np.ones((1, 8)), Cluster(1, 4), **changes)


def test_dead_devices_hold_nothing_and_by_default_the_others_hold_all_experts_in_as_few_slots_as_do() -> None:
    found = eplb.solve(np.ones((2, 8)), Cluster(1, 4), dead=[1]).placement
    assert found.slots.tolist() == [3, 0, 3, 3]
    assert found.holds(1)[:, [0, 2, 3]].any(axis=1).all()


@pytest.mark.parametrize(
    "changes",
    [{"method": "best"}, {"groups": "half"}, {"quantile": 0.5}, {"num_groups": 0}, {"num_groups": -2}],
    ids=str,
)
def test_unknown_choices_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        eplb.solve(np.ones((1, 8)), Cluster(1, 4), **changes)
