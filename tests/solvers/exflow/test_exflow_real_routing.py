from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import exflow
from moeplan.solvers.cost import hops_kept
from moeplan.traces.split import fitted

Array = NDArray[Any]
GATE = {4: 0.70, 8: 0.575, 16: 0.448, 32: 0.335}


@pytest.fixture(scope="module")
def routing(gpt_oss: Path) -> tuple[Array, Array]:
    with np.load(gpt_oss) as data:
        return data["expert_ids"][:, :, 0].astype(np.int64), data["seq_id"].astype(np.int64)


def transitions(ids: Array) -> Array:
    pairs = ids[:, :-1] * 32 + ids[:, 1:]
    return np.stack([np.bincount(pair, minlength=1024) for pair in pairs.T]).reshape(-1, 32, 32)


@pytest.mark.parametrize("num_devices", GATE)
def test_placements_of_real_routing_keep_the_hops_of_unseen_samples(
    routing: tuple[Array, Array], num_devices: int
) -> None:
    ids, sample = routing
    samples, of_sample = np.unique(sample, return_inverse=True)
    fit = fitted(samples, seed=0, fraction=0.5)[of_sample]
    found = exflow.solve(transitions(ids[fit]), Cluster(1, num_devices), work=4e8, time_limit_s=100)
    unseen = transitions(ids[~fit]).astype(float)
    assert hops_kept(unseen, found.placement, num_devices).device.sum() / unseen.sum() >= GATE[num_devices]
