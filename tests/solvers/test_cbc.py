import tempfile
from pathlib import Path

import pulp
import pytest

from moeplan.solvers.cbc import solve_by_cbc


def knapsack() -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    model = pulp.LpProblem("knapsack", pulp.LpMinimize)
    x = [model.add_variable(f"x_{i}", cat="Binary") for i in range(4)]
    model += pulp.lpDot([-10, -13, -7, -8], x)
    model += pulp.lpDot([5, 7, 4, 3], x) <= 11
    return model, x


def test_it_finds_the_optimum_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, x = knapsack()
    solve_by_cbc(model, time_limit_s=60, options=["randomSeed 3"])
    assert model.sol_status == pulp.LpSolutionOptimal
    assert [round(item.value()) for item in x] == [0, 1, 0, 1]
    assert not list(tmp_path.iterdir())


def test_one_that_does_not_heed_its_limit_is_killed_and_nothing_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf, files, called = tmp_path / "cbc", tmp_path / "files", tmp_path / "called"
    deaf.write_text(f'#!/bin/sh\necho "$@" > {called}\nexec sleep 60\n')
    deaf.chmod(0o755)
    files.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(files))
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(deaf))
    model, _ = knapsack()
    solve_by_cbc(model, time_limit_s=0.5)
    assert "-timeMode elapsed -sec 0.45 " in called.read_text()
    assert "-mips" not in called.read_text()  # no variable has a value
    assert model.sol_status == pulp.LpSolutionNoSolutionFound
    assert not list(files.iterdir())
