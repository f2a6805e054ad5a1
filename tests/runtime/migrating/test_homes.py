"""Homes solved for in the background, from a plan and its predictor, whose file is exact and can hurt nobody."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moeplan.errors import InputError, MoeplanError, UsageError
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.world import World
from moeplan.runtime.decisions import SamplePolicyDecision, SidecarFile
from moeplan.runtime.migrating.homes import Homes, SamplePolicy
from moeplan.runtime.migrating.predictor import Predictor
from moeplan.runtime.plan import Plan
from moeplan.solvers import netmoe
from tests.builders import known
from tests.runtime.migrating.migrating_cases import Moving
from tests.runtime.plans import made_plan
from tests.runtime.worlds import by_rank

HOMES = {
    "even": [0, 1, 2, 3, 0, 1, 2, 3],
    "uneven": [3, 0, 0, 3, 0, 1, 0],
    "all on one": [2] * 6,
    "one sample": [1],
    "none": [],
}
LAYER = 1


def policy(method: str, *, predicted: bool) -> SamplePolicy:
    per_pair = np.random.default_rng(3).normal(0.3, 0.5, (2, 8, 4)).astype(np.float32)
    return SamplePolicy(method, frozenset({LAYER}), Predictor(per_pair) if predicted else None, Cluster(2, 2), 32)


def counts(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies to devices and pairs with experts."""
    rng = np.random.default_rng(num_samples)
    pairs = rng.integers(0, 40, (num_samples, 8))
    return torch.from_numpy(pairs.reshape(-1, 4, 2).sum(axis=2) - 1), torch.from_numpy(pairs)


def solve_all(world: World, homes: Sequence[list[int]]) -> list[Any]:
    """Homes by every method with and without a predictor, the bytes sent, and how a thread's error shows."""
    answers: list[Any] = []
    for home in map(np.array, homes):
        copies, pairs = counts(len(home))
        here = torch.from_numpy(home.astype(np.int64) == world.rank)
        for method in netmoe.METHODS:
            for predicted in (True, False):
                asked = policy(method, predicted=predicted)
                solving = Homes(
                    asked, LAYER, copies[here], pairs[here], home.astype(np.int64), np.ones(len(home), np.int64), None
                )
                answers.append((solving.result(), solving.sent_bytes))
    broken = replace(policy("sum", predicted=False), method="no such method")
    copies, pairs = counts(4)
    for _ in range(2):
        failing = Homes(
            broken, LAYER, copies[[world.rank]], pairs[[world.rank]], np.arange(4), np.ones(4, np.int64), None
        )
        for _ in range(2):
            with pytest.raises(KeyError, match="no such method"):
                failing.result()
    return [*answers, threading.active_count()]


@pytest.fixture(scope="module")
def ranks() -> list[list[Any]]:
    return by_rank(4, solve_all, list(HOMES.values()))


def test_every_rank_finds_the_homes_that_one_process_finds_from_all_counts(ranks: list[list[Any]]) -> None:
    for answers in map(iter, ranks):
        for home in HOMES.values():
            copies, pairs = (kind.numpy() for kind in counts(len(home)))
            for method in netmoe.METHODS:
                for predicted in (True, False):
                    device, _ = next(answers)
                    predictor = policy(method, predicted=predicted).predictor
                    expected = np.zeros(0, np.int64)
                    if len(home):
                        following = None if predictor is None else predictor.copies(LAYER, pairs)
                        expected = netmoe.rehome(
                            method, copies, pairs.sum(axis=1), Cluster(2, 2), next_copies=following, copy_bytes=32
                        ).device_of_sample
                    assert device.dtype == np.int64
                    assert np.array_equal(device, expected)
    devices = [device for device, _ in ranks[0][:-1]]
    assert any(not np.array_equal(*pair) for pair in zip(devices[::2], devices[1::2], strict=True))  # by the prediction


def test_a_rank_sends_the_counts_of_its_samples_to_all_others_and_leaves_no_thread(ranks: list[list[Any]]) -> None:
    for rank, answers in enumerate(ranks):
        sent = [sent_bytes for _, sent_bytes in answers[:-1]]
        assert sent == [home.count(rank) * (4 + 8) * 4 * 3 for home in HOMES.values() for _ in range(8)]
        assert answers[-1] <= ranks[0][-1] < 5


def plan_with(predictor: Predictor | None, method: str = "even") -> Plan:
    named = None if predictor is None else SidecarFile.of("predictor", predictor.to_bytes())
    policy = SamplePolicyDecision(method=method, layers=(0, 2), predictor=named)
    return made_plan(Cluster(2, 2), Moving().config.spec(), sample_policy=policy)


def test_a_policy_is_what_the_plan_decides_with_the_predictor_beside_it(tmp_path: Path) -> None:
    predictor = Predictor(np.random.default_rng(0).random((2, 8, 4), np.float32))
    (tmp_path / SidecarFile.of("predictor", predictor.to_bytes()).file).write_bytes(predictor.to_bytes())
    decided = SamplePolicy.of(plan_with(predictor), tmp_path)
    assert np.array_equal(known(decided.predictor).per_pair, predictor.per_pair)
    assert (decided.method, decided.layers, decided.cluster) == ("even", frozenset({0, 2}), Cluster(2, 2))
    assert decided.copy_bytes == 16 * 4
    assert SamplePolicy.of(plan_with(None), None).predictor is None


@pytest.mark.parametrize("damage", ["missing", "another", "no folder", "method"])
def test_a_policy_that_cannot_be_carried_out_is_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    predictor = Predictor(np.ones((2, 8, 4), np.float32))
    plan = plan_with(None, "dice") if damage == "method" else plan_with(predictor)
    if damage == "another":
        name = SidecarFile.of("predictor", predictor.to_bytes()).file
        (tmp_path / name).write_bytes(Predictor(np.zeros((2, 8, 4), np.float32)).to_bytes())
    with pytest.raises(MoeplanError) as refused:
        SamplePolicy.of(plan, None if damage == "no folder" else tmp_path)
    expected = {
        "missing": (InputError, "is not there; the plan needs it"),
        "another": (InputError, "has hash"),
        "no folder": (UsageError, "was not loaded from one"),
        "method": (UsageError, "'dice'; expected sum or even or bottleneck or paper"),
    }[damage]
    assert type(refused.value) is expected[0]
    assert expected[1] in str(refused.value)
    assert "\n" not in str(refused.value)


SHAPES = st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4))


def test_copies_are_predicted_layer_by_layer_never_negative_and_by_finite_numbers_of_the_shape_only() -> None:
    predictor = Predictor(np.array([[[1.0, -2.0], [0.5, 0.0]]], np.float32))
    assert known(predictor.copies(0, np.array([[2, 4], [0, 1]]))).tolist() == [[4, 0], [0.5, 0]]
    assert predictor.copies(1, np.array([[2, 4]])) is None
    contents = Predictor(np.full((1, 1, 2), np.nan, np.float32)).to_bytes()
    for rows, words in ((1, "not finite"), (2, "expected copies_per_pair float32")):
        with pytest.raises(InputError, match=words):
            Predictor.from_bytes(contents, (1, rows, 2))


@settings(max_examples=30)
@given(st.data(), SHAPES)
def test_its_file_gives_it_back(data: st.DataObject, shape: tuple[int, int, int]) -> None:
    values = data.draw(hnp.arrays(np.float32, shape, elements=st.floats(-1e6, 1e6, width=32)))
    contents = Predictor(values).to_bytes()
    np.testing.assert_array_equal(Predictor.from_bytes(contents, shape).per_pair, values)
    assert contents == Predictor(values).to_bytes()


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_file_is_refused_or_a_predictor_of_the_shape(data: st.DataObject) -> None:
    contents = bytearray(Predictor(np.ones((1, 2, 3), np.float32)).to_bytes())
    if data.draw(st.booleans()):
        del contents[data.draw(st.integers(0, len(contents) - 1)) :]
    else:
        contents[data.draw(st.integers(0, len(contents) - 1))] = data.draw(st.integers(0, 255))
    try:
        predictor = Predictor.from_bytes(bytes(contents), (1, 2, 3))
    except InputError:
        return
    assert predictor.per_pair.shape == (1, 2, 3)
    assert np.isfinite(predictor.per_pair).all()


def test_copies_are_the_same_sums_in_any_order_and_of_any_part() -> None:
    rng = np.random.default_rng(0)
    per_pair, pairs = rng.normal(size=(1, 64, 8)).astype(np.float32), rng.integers(0, 2**20, (40, 64))
    order = rng.permutation(64)
    predicted = known(Predictor(per_pair).copies(0, pairs))
    np.testing.assert_array_equal(predicted, Predictor(per_pair[:, order]).copies(0, pairs[:, order]))
    np.testing.assert_array_equal(predicted[7:9], Predictor(per_pair).copies(0, pairs[7:9]))
    np.testing.assert_allclose(predicted, np.maximum(pairs @ per_pair[0].astype(float), 0), rtol=1e-5, atol=2)
