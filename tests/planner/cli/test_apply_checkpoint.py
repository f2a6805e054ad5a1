"""`moeplan apply --checkpoint` and `--undo`, as a user calls them."""

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeplan.runtime.plan import Metric, Verdict, save
from tests.runtime.checkpoints.made_checkpoints import (
    assert_same,
    expert_tensors,
    files_of,
    permuted_by_hand,
    plan_of,
    read_tensors,
    spec,
    write_checkpoint,
)

ROWS = [[2, 0, 3, 1], [3, 1, 0, 2]]
Run = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a plan and a checkpoint."""
    write_checkpoint(tmp_path / "model", expert_tensors((0, 1), 4), shards=2)
    save(plan_of(spec(), ROWS), tmp_path / "plan.json")
    return tmp_path


def test_a_checkpoint_is_permuted_told_and_undone(moeplan: Run, folder: Path) -> None:
    told = moeplan("apply", "--checkpoint", "model", "-o", "planned", cwd=folder).stdout
    assert "wrote     planned    5 files" in told
    assert "4 experts of 2 layers in the plan's order" in told
    assert "expert parallelism over 2 ranks, 2 experts each" in told
    assert "moeplan apply --undo planned -o DIR" in told
    expected = permuted_by_hand(read_tensors(folder / "model"), plan_of(spec(), ROWS))
    assert_same(read_tensors(folder / "planned"), expected)
    assert not (folder / ".moeplan").exists()
    (folder / "plan.json").unlink()
    told = moeplan("apply", "--undo", "planned", "-o", "back", cwd=folder).stdout
    assert "byte for byte what was permuted" in told
    assert files_of(folder / "back") == files_of(folder / "model")


def test_json_holds_what_was_done(moeplan: Run, folder: Path) -> None:
    done = moeplan("apply", "plan.json", "--checkpoint", "model", "-o", "planned", "--json", cwd=folder)
    told = json.loads(done.stdout)
    assert (told["plan"], told["directory"], told["layers"], told["num_experts"]) == ("plan.json", "planned", [0, 1], 4)
    done = moeplan("apply", "--undo", "planned", "-o", "back", "--json", cwd=folder)
    assert json.loads(done.stdout)["changed"] == []


def test_what_an_engine_makes_of_a_coherent_plan_without_benefit_is_said(moeplan: Run, folder: Path) -> None:
    gain = Metric(value=0.0, low=None, high=None)
    verdict = Verdict(value="none", metric="device_copies", against="contiguous", gain=gain, at_least=0.0)
    options = {"placement": {"dispatch_model": "coherent"}}
    save(plan_of(spec(), ROWS, options=options, verdict=verdict), folder / "coherent.json")
    told = moeplan("apply", "coherent.json", "--checkpoint", "model", "-o", "planned", cwd=folder).stdout
    assert "the plan is for coherent dispatch; an engine's standard dispatch returns tokens home" in told
    assert "no benefit expected" in told


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--checkpoint", "model"), 2, "-o DIRECTORY goes with one of"),
        (("-o", "out"), 2, "-o DIRECTORY goes with one of"),
        (("--checkpoint", "model", "--engine", "sglang", "-o", "out"), 2, "-o DIRECTORY goes with one of"),
        (("--checkpoint", "model", "--undo", "model", "-o", "out"), 2, "-o DIRECTORY goes with one of"),
        (("--checkpoint", "model", "--trace", "traces", "-o", "out"), 2, "do not go with --checkpoint"),
        (("--checkpoint", "model", "-o", "model"), 2, "already there and not empty"),
        (("--checkpoint", "model", "-o", "model/planned"), 2, "inside model, which is read"),
        (("--checkpoint", "gone", "-o", "out"), 3, "gone: no directory"),
        (("--undo", "model", "-o", "out", "--", "true"), 2, "true: --undo needs neither"),
        (("--undo", "model", "-o", "out"), 3, "no moeplan-permutation.json"),
        (("gone.json", "--checkpoint", "model", "-o", "out"), 3, "gone.json: cannot be read"),
        (("--checkpoint", "model", "-o", "plan.json/out"), 7, "cannot be written"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    words: tuple[str, ...], code: int, message: str, moeplan: Run, folder: Path
) -> None:
    before = files_of(folder)
    error = moeplan("apply", *words, cwd=folder, code=code).stderr
    assert message in error
    assert error.count("\n") == 1
    assert files_of(folder) == before


def test_what_is_written_has_the_rights_of_new_files(moeplan: Run, folder: Path) -> None:
    (folder / "model" / "config.json").chmod(0o400)
    moeplan("apply", "--checkpoint", "model", "-o", "planned", cwd=folder)
    (folder / "fresh").mkdir()
    assert stat.S_IMODE((folder / "planned").stat().st_mode) == stat.S_IMODE((folder / "fresh").stat().st_mode)
    assert (folder / "planned" / "config.json").stat().st_mode & stat.S_IWUSR
