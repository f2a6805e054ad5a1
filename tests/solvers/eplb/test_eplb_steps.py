from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import eplb
from moeplan.solvers.outcome import Status
from moeplan.solvers.placement import Placement

Array = NDArray[Any]


def ratios(loads: Array, placement: Placement) -> Array:
    """Max/mean device load of every step and layer, from the definition, `[B, L]`."""
    found = np.ones(loads.shape[:2])
    for step, layer in np.ndindex(found.shape):
        held = placement.holds(layer)[:, placement.slots > 0]
        device = loads[step, layer] @ (held / held.sum(axis=1, keepdims=True))
        if device.sum():
            found[step, layer] = device.max() / device.mean()
    return found


def topical(rng: np.random.Generator, num_steps: int, num_layers: int, num_experts: int) -> Array:
    """Steps whose busy experts come and go together."""
    topics = rng.lognormal(0, 1, (4, num_layers, num_experts))
    mixed = np.einsum("bt,tle->ble", rng.dirichlet(np.full(4, 0.4), num_steps), topics)
    return np.asarray(rng.poisson(500 * mixed / mixed.mean(axis=2, keepdims=True)), np.float64)


def test_experts_busy_in_the_same_step_are_put_apart_which_their_means_do_not_tell() -> None:
    steps = np.array([[[1.0, 1.0, 0.0, 0.0]], [[0.0, 0.0, 1.0, 1.0]]])
    found = eplb.solve(steps, Cluster(1, 2))
    assert found.outcome.objective.name == "step_balance"
    assert found.outcome.objective.value == 1
    assert found.outcome.status is Status.OPTIMAL
    for pair in ((0, 1), (2, 3)):
        homes = found.placement.holds(0)[list(pair)].argmax(axis=1)
        assert homes[0] != homes[1]


def test_an_expert_busy_in_bursts_gets_the_replica_that_a_steady_one_of_more_load_does_not_need() -> None:
    bursts = np.zeros((8, 1, 4))
    bursts[:, 0] = [5.0, 0.0, 5.0, 5.0]
    bursts[::2, 0, 1] = 9.0
    found = eplb.solve(bursts, Cluster(1, 5), slots=1)
    assert found.placement.holds(0)[1].sum() == 2
    assert eplb.solve(bursts.mean(axis=0), Cluster(1, 5), slots=1).placement.holds(0)[1].sum() == 1


@pytest.mark.parametrize("quantile", [None, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(
    ("shape", "num_groups", "slots"), [("1x4", None, 5), ("2x2", 4, 5), ("1x4", None, [4, 6, 0, 7])]
)
def test_no_start_is_better_for_the_steps_and_the_objective_is_as_defined(
    shape: str, num_groups: int | None, slots: Any, quantile: float | None, rng: np.random.Generator
) -> None:
    loads, cluster = topical(rng, 31, 2, 16), Cluster.parse(shape)
    loads[3] = 0
    known: dict[str, Any] = {"slots": slots, "num_groups": num_groups}
    found = eplb.solve(loads, cluster, **known, quantile=quantile)

    def value(placement: Placement) -> float:
        by_step = ratios(loads, placement)
        if quantile is None:
            return float(by_step.mean())
        enough = int(np.ceil(quantile * (len(loads) - 1)))
        return float(np.sort(by_step, axis=0)[enough].mean())

    name = "step_balance" if quantile is None else f"step_balance_p{round(100 * quantile)}"
    assert found.outcome.objective.name == name
    assert found.outcome.objective.value == pytest.approx(value(found.placement))
    assert found.outcome.bound is not None
    assert 1 <= found.outcome.bound <= found.outcome.objective.value
    for method in ("published", "refined"):
        of_mean = eplb.solve(loads.mean(axis=0), cluster, **known, method=method)
        assert value(found.placement) < value(of_mean.placement)
    published = eplb.solve(loads, cluster, **known, method="published", quantile=quantile)
    assert published.outcome.objective.value == pytest.approx(value(published.placement))
    if num_groups:
        for row in found.placement.physical_to_logical.reshape(2, cluster.num_nodes, -1):
            assert sum(len(set((node // 4).tolist())) for node in row) == num_groups


def test_what_it_gains_it_keeps_on_steps_it_has_not_seen(rng: np.random.Generator) -> None:
    loads = topical(rng, 200, 2, 32)
    found, of_mean = (eplb.solve(seen, Cluster(1, 8), slots=5) for seen in (loads[::2], loads[::2].mean(axis=0)))
    unseen = [ratios(loads[1::2], one.placement).mean() - 1 for one in (found, of_mean)]
    assert unseen[0] < 0.7 * unseen[1]


@settings(max_examples=25)
@given(st.data())
def test_steps_keep_every_constraint(data: st.DataObject) -> None:
    num_experts, num_devices = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 4))
    slots = data.draw(st.lists(st.integers(1, num_experts), min_size=num_devices, max_size=num_devices))
    slots[0] = num_experts
    dead = data.draw(st.sets(st.integers(1, num_devices - 1), max_size=2)) if num_devices > 1 else set()
    pins = {(data.draw(st.integers(0, num_experts - 1)), 0)}
    cells = st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts)
    loads = np.array(data.draw(st.lists(st.lists(cells, min_size=2, max_size=2), min_size=1, max_size=5)))
    quantile = data.draw(st.sampled_from([None, 0.5]))
    found = eplb.solve(loads, Cluster(1, num_devices), slots=slots, dead=dead, pins=pins, quantile=quantile)
    assert found.placement.slots.tolist() == [0 if d in dead else s for d, s in enumerate(slots)]
    assert all(found.placement.holds(layer)[pin] for layer in range(2) for pin in pins)


def test_one_step_is_placed_as_its_loads_are(rng: np.random.Generator) -> None:
    loads = rng.lognormal(0, 1, (3, 16))
    one, alone = eplb.solve(loads[None], Cluster(1, 4), slots=5), eplb.solve(loads, Cluster(1, 4), slots=5)
    assert one.outcome.objective.value == pytest.approx(alone.outcome.objective.value, rel=1e-3)


def test_no_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="no axis empty"):
        eplb.solve(np.ones((0, 2, 4)), Cluster(1, 2))
