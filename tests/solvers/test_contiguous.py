import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import UsageError
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import contiguous


@given(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_slot_i_holds_expert_i_mod_e_sorted_on_each_device(num_experts: int, slots: list[int]) -> None:
    slots = [min(s, num_experts) for s in slots]
    slots[0] = num_experts if sum(slots) < num_experts else slots[0]
    found = contiguous.solve(2, num_experts, Cluster(1, len(slots)), slots=slots).placement
    flat, rows = np.arange(sum(slots)) % num_experts, []
    for end, size in zip(np.cumsum(slots), slots, strict=True):
        rows += sorted(flat[end - size : end].tolist())
    assert found.physical_to_logical.tolist() == [rows, rows]


def test_surplus_slots_repeat_the_first_experts_and_cost_their_nominal_balance() -> None:
    found = contiguous.solve(1, 5, Cluster(1, 2))
    assert found.placement.physical_to_logical.tolist() == [[0, 1, 2, 0, 3, 4]]
    assert found.outcome.objective.value == pytest.approx(1.0)
    assert found.outcome.bound is None


@pytest.mark.parametrize(("num_layers", "num_experts"), [(0, 4), (1, 0)])
def test_nothing_to_place_is_refused(num_layers: int, num_experts: int) -> None:
    with pytest.raises(UsageError, match="at least one of each"):
        contiguous.solve(num_layers, num_experts, Cluster(1, 2))
