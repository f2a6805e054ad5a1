"""The case of condensation's own work: sizes, work, and answers, of which wrong ones are told."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moeplan.profilers.cases.works import work_of
from moeplan.profilers.measurement import Size
from moeplan.profilers.world import World
from moeplan.runtime.condensed_rows import CondensedRows, Folded, Gathered, group_sizes
from moeplan.runtime.engine import clusters, condenser
from moeplan.runtime.engine.fold import Fold

CASE, WORLD = CondensedRows(), World(1, 4, "cpu", ("host",) * 4, print)
SIZES = [
    {"rows": rows, "group": group, "hidden": 64, "backward": backward}
    for rows, group in ((2, 16), (60, 8), (300, 64))
    for backward in (0, 1)
]
every_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: "-".join(map(str, size.values())))
every_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])


def ran(size: Size, dtype: str = "fp32", world: World = WORLD) -> tuple[Gathered, Folded]:
    inputs = CASE.prepare(size, dtype, world)
    return inputs, CASE.run(inputs)


@every_size
@every_dtype
def test_what_was_folded_is_right_and_stays_right_when_repeated(size: Size, dtype: str) -> None:
    inputs, output = ran(size, dtype)
    assert CASE.check(inputs, output, WORLD) is None
    assert CASE.check(inputs, CASE.run(inputs), WORLD) is None
    assert len(output.grads) == 2 * size["backward"]


@every_size
def test_what_was_never_computed_and_the_answer_of_another_rank_are_wrong(size: Size) -> None:
    inputs, output = ran(size)
    theirs = ran(size, world=World(2, 4, "cpu", WORLD.hosts, print))[1]
    for value in (torch.nan, 0.0):
        for place, part in enumerate([output.y, *output.grads]):
            parts = [output.y, *output.grads]
            parts[place] = torch.full_like(part, value)
            if part.any():
                assert CASE.check(inputs, Folded(parts[0], parts[1:]), WORLD) is not None
    assert CASE.check(inputs, theirs, WORLD) is not None
    assert CASE.check(inputs, replace(output, y=theirs.y), WORLD) is not None


@pytest.mark.parametrize("backward", [0, 1])
def test_sums_and_gradients_are_those_of_copies_one_by_one(backward: int) -> None:
    """No code of the case's check: every copy in a loop, in float64, gradients by autograd."""
    inputs, output = ran({"rows": 60, "group": 8, "hidden": 64, "backward": backward})
    x_TM, weight_TK = (one.double().requires_grad_() for one in (inputs.x, inputs.weight))
    y_TM, beside = list[Tensor](), torch.zeros((), dtype=torch.float64)
    near = [(inputs.near == number).nonzero().flatten().tolist() for number in inputs.near.tolist()]
    for token in range(len(x_TM)):
        alone = len(near[token]) == 1
        y_M = 2 * x_TM[token] if alone else torch.zeros(64, dtype=torch.float64)
        for choice in range(2 * (not alone)):
            squares = {other: float(weight_TK.detach()[other, choice]) ** 2 for other in near[token]}
            mean_M = sum(square * x_TM[other] for other, square in squares.items()) / sum(squares.values())
            y_M = y_M + weight_TK[token, choice] * mean_M
        y_TM.append(y_M)
        beside = beside + 2 * (weight_TK[token] * weight_TK[token].detach()).sum() * alone
    torch.testing.assert_close(output.y.double(), torch.stack(y_TM).detach(), rtol=1e-5, atol=1e-5)
    if inputs.grad is not None:
        ((torch.stack(y_TM) * inputs.grad).sum() + beside).backward()  # type: ignore[no-untyped-call]
        for found, exact in zip(output.grads, (x_TM.grad, weight_TK.grad), strict=True):
            torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)


def alone(copies: Any, *_: Any, **__: Any) -> Tensor:
    return torch.arange(len(copies.row))


def shifted(copies: Any, x_TM: Tensor, *others: Any, **settings: Any) -> Tensor:
    """A search that reads the vectors of other tokens."""
    return FOUND(copies, x_TM.roll(1, 0), *others, **settings)


def medoids(of: Callable[..., Fold]) -> Callable[..., Fold]:
    return lambda *columns, **_: of(*columns, medoid=True)


FOUND = condenser.standing


@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("wrong", [alone, shifted, "medoid"])
def test_rows_that_all_travel_other_rows_and_other_means_are_wrong_answers(
    monkeypatch: pytest.MonkeyPatch, wrong: Any, backward: int
) -> None:
    if wrong == "medoid":
        monkeypatch.setattr(Fold, "of", medoids(Fold.of))
    else:
        monkeypatch.setattr(condenser, "standing", wrong)
    inputs, output = ran({"rows": 60, "group": 8, "hidden": 64, "backward": backward})
    assert str(CASE.check(inputs, output, WORLD)).startswith("the sum of a token is off by")


def test_a_wrong_gradient_is_told_beside_right_sums() -> None:
    inputs, output = ran({"rows": 60, "group": 8, "hidden": 64, "backward": 1})
    for place, what in enumerate(("a token", "a gate weight")):
        grads = [one.clone() for one in output.grads]
        grads[place][3] += 0.1
        assert str(CASE.check(inputs, replace(output, grads=grads), WORLD)).startswith(f"the gradient of {what} is off")


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("quick", [True, False])
def test_a_grid_is_small_and_rises_and_its_axes_vary_independently(device: str, quick: bool) -> None:
    sizes = CASE.sizes(World(0, 4, device, WORLD.hosts, print), quick=quick)
    assert sizes == CASE.sizes(World(3, 4, device, WORLD.hosts, print), quick=quick)
    works = [CASE.work(size, 4) for size in sizes]
    assert works == sorted(works)
    assert works[0] > 0
    assert len(sizes) <= (16 if quick else 24)
    assert all(size["group"] <= size["rows"] // 2 and size["rows"] % 2 == 0 for size in sizes)
    met = {(size["group"], size["hidden"], size["backward"]) for size in sizes}
    assert len(met) == 8
    assert {type(work) for work in works} == {int}
    arrays = {axis: np.array([size[axis] for size in sizes]) for axis in sizes[0]}
    np.testing.assert_array_equal(work_of("condensed_rows", arrays, 1), works)
    assert works == [size["rows"] * size["group"] * size["hidden"] for size in sizes]


@given(st.integers(1, 10**4), st.integers(1, 1024))
def test_a_row_meets_about_as_many_as_asked_and_groups_hold_all_rows(count: int, mean: int) -> None:
    sizes_G = group_sizes(count, mean)
    assert sizes_G.sum() == count
    assert sizes_G.min() > 0
    if 16 <= mean <= count:
        assert (sizes_G**2).sum() / count == pytest.approx(mean, rel=0.3)


@pytest.mark.parametrize("size", CASE.sizes(World(0, 4, "cpu", WORLD.hosts, print), quick=False)[::2])
def test_rows_of_the_grid_are_compared_as_often_as_its_sizes_say(size: Size) -> None:
    inputs = CASE.prepare({**size, "hidden": 1}, "fp32", WORLD)
    sizes_g = clusters.grouped(inputs.copies, torch.ones(size["rows"]))[1].numpy()
    assert clusters.compared(sizes_g).sum() / size["rows"] == pytest.approx(size["group"], rel=0.15)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=5))
def test_pairs_are_compared_in_blocks_of_about_equal_size(sizes: list[int]) -> None:
    batches = clusters._batches(torch.arange(sum(sizes)), torch.tensor(sizes))
    several = sum(int(real_Bw.sum(1).square().sum()) for _, real_Bw in batches)
    assert clusters.compared(np.array(sizes)).sum() == several + sizes.count(1)


def test_the_case_is_known_without_torch() -> None:
    program = "import sys, moeplan.runtime.condensed_rows; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
