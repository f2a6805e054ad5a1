import numpy as np
import pytest

from moeplan.solvers.eplb.kernel import descend, kick, place, state_of


@pytest.mark.parametrize("slots", [[3, 3, 3, 3], [5, 0, 2, 4], [8, 8, 1, 1]])
def test_changes_leave_the_state_that_its_experts_give_when_placed_anew(
    slots: list[int], rng: np.random.Generator
) -> None:
    weight, pinned = rng.lognormal(0, 1, 8), np.zeros((4, 8), dtype=np.bool_)
    first, num_slots = np.concatenate([[0], np.cumsum(slots)]), sum(slots)
    table = np.concatenate([np.arange(8), np.arange(8), np.arange(8)])[:num_slots]
    pinned[0, 1] = True
    state, anew = state_of(weight, first, pinned), state_of(weight, first, pinned)
    place(state, table)
    seed = np.array([3], np.uint64)
    for turn in range(300):
        kick(state, seed)
        if turn % 3 == 0:
            descend(state, 0.0, 500)
        place(anew, state.expert)
        assert (state.held == anew.held).all()
        assert (state.copies == anew.copies).all()
        for x in range(8):
            assert sorted(state.at[x, : state.copies[x]]) == sorted(anew.at[x, : anew.copies[x]])
        np.testing.assert_allclose(state.share, anew.share, rtol=1e-9)
        np.testing.assert_allclose(state.load, anew.load, rtol=1e-9, atol=1e-12)
        assert state.held[0, 1]
    assert (state.expert != table).any()
