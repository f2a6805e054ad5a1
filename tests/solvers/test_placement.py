from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.errors import UsageError
from moeplan.solvers.placement import Placement, slots_for


@pytest.mark.parametrize("slots", [3, np.int64(3), np.array(3), [3, 3], np.array([3, 3], np.int32)], ids=repr)
def test_one_number_of_any_integer_type_holds_for_all_devices(slots: int | Sequence[int] | NDArray[Any]) -> None:
    found = slots_for(6, 2, slots)
    assert found.tolist() == [3, 3]
    assert found.dtype == np.int64


@pytest.mark.parametrize("slots", [[3], [3, 3, 3], [[3, 3]], -1, 7, 2**70, np.int64(2)], ids=repr)
def test_slots_that_do_not_fit_are_told(slots: Any) -> None:
    with pytest.raises(UsageError, match="expected"):
        slots_for(6, 2, slots)


def test_the_experts_that_a_device_holds_are_those_it_was_given_ascending() -> None:
    given = [[[3, 0], [], [1, 2, 3]], [[1, 2], [], [3, 0, 1]]]
    placement = Placement.from_sets(given, 4)
    assert [[placement.held(layer, device) for device in range(3)] for layer in range(2)] == [
        [sorted(experts) for experts in layer] for layer in given
    ]
