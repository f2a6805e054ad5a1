"""The active plan: which one is found, and how one becomes it."""

from pathlib import Path

import pytest

from moeplan.errors import InputError
from moeplan.profilers.cluster import Cluster
from moeplan.runtime import load_plan
from moeplan.runtime.active import activate
from moeplan.runtime.plan import save
from moeplan.traces.model import ModelSpec
from tests.runtime.plans import made_plan


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOEPLAN_PLAN", raising=False)


def written(path: Path, seed: int) -> Path:
    model = ModelSpec(name="m", layer_ids=(0,), num_experts=2, top_k=1)
    save(made_plan(Cluster(1, 1), model, seed=seed), path)
    return path


def test_the_active_plan_is_a_byte_copy(tmp_path: Path) -> None:
    plan = written(tmp_path / "plan.json", 1)
    plan.write_bytes(plan.read_bytes() + b"\n\n")
    assert activate(plan) == Path(".moeplan/active.json")
    assert (tmp_path / ".moeplan" / "active.json").read_bytes() == plan.read_bytes()
    assert [path.name for path in (tmp_path / ".moeplan").iterdir()] == ["active.json"]


def test_another_directory_gets_its_own_active_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = written(tmp_path / "plan.json", 1)
    assert activate(plan, tmp_path / "job") == tmp_path / "job" / ".moeplan" / "active.json"
    assert not (tmp_path / ".moeplan").exists()
    monkeypatch.chdir(tmp_path / "job")
    assert load_plan().seed == 1


def test_activating_again_replaces_it(tmp_path: Path) -> None:
    for seed in (1, 2):
        activate(written(tmp_path / "plan.json", seed))
        assert load_plan().seed == seed


@pytest.mark.parametrize("content", [b"", b"{}", None], ids=["empty", "no plan", "missing"])
def test_what_is_no_plan_does_not_become_active(content: bytes | None, tmp_path: Path) -> None:
    activate(written(tmp_path / "plan.json", 1))
    if content is not None:
        (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.json"):
        activate(tmp_path / "bad.json")
    assert load_plan().seed == 1


def test_a_given_path_goes_before_the_variable_before_the_active_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate(written(tmp_path / "plan.json", 1))
    assert load_plan().seed == 1
    monkeypatch.setenv("MOEPLAN_PLAN", str(written(tmp_path / "named.json", 2)))
    assert load_plan().seed == 2
    assert load_plan(written(tmp_path / "given.json", 3)).seed == 3


def test_the_nearest_active_plan_upward_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    activate(written(tmp_path / "plan.json", 1))
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert load_plan().seed == 1
    monkeypatch.chdir(tmp_path / "a")
    activate(written(tmp_path / "plan.json", 2))
    monkeypatch.chdir(inner)
    assert load_plan().seed == 2


def test_without_any_plan_the_message_says_what_to_run() -> None:
    with pytest.raises(InputError, match=r"MOEPLAN_PLAN is not set.*moeplan apply") as caught:
        load_plan()
    assert "\n" not in str(caught.value)


def test_a_variable_that_names_nothing_is_refused_and_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate(written(tmp_path / "plan.json", 1))
    monkeypatch.setenv("MOEPLAN_PLAN", str(tmp_path / "gone.json"))
    with pytest.raises(InputError, match=r"gone\.json"):
        load_plan()
