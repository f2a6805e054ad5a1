"""Replica choice as tensors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.runtime.engine.layer_placement import Replicas
from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.solvers.replicas import ReplicaTable


@pytest.mark.parametrize("rule", list(ReplicaRule))
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_tensors_choose_the_devices_that_the_solvers_table_chooses(rule: ReplicaRule, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_experts, num_devices = int(rng.integers(1, 9)), 2 * int(rng.integers(1, 4))
    held = [set(rng.choice(num_experts, rng.integers(0, num_experts + 1), replace=False)) for _ in range(num_devices)]
    held[-1] |= set(range(num_experts)) - set().union(*held)
    table = ReplicaTable.of(Placement.from_sets([held], num_experts, rule), 0, num_devices // 2)  # type: ignore[list-item]
    ids, sample, position = rng.integers(num_experts, size=(20, 3)), *rng.integers(2**45, size=(2, 20))
    for home in range(num_devices):
        replicas = Replicas.seen_from(home, table, torch.device("cpu"))
        found = replicas.choose(*map(torch.tensor, (ids, sample, position)))
        assert found.tolist() == table.choose(ids, np.full(20, home), sample + position).tolist()
