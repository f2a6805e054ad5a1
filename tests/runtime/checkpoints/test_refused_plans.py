"""Plans that no checkpoint can carry, and permutations that undo nothing: one line each, and nothing written."""

import json
from pathlib import Path

import pytest

from moeplan.errors import InputError, MismatchError, UsageError
from moeplan.files import sha256_json
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.checkpoints import permute, undo
from moeplan.solvers.placement import Placement
from tests.runtime.checkpoints.made_checkpoints import (
    PLAN,
    ROWS,
    assert_refused,
    expert_tensors,
    plan_of,
    spec,
    write_checkpoint,
)
from tests.runtime.plans import made_plan


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", expert_tensors((0, 1), 4))


def test_plans_that_no_checkpoint_can_carry_are_refused_with_what_helps(source: Path, tmp_path: Path) -> None:
    replicas = Placement.from_sets([[[0, 1, 2], [1, 2, 3]]] * 2, 4)
    unequal = Placement.from_sets([[[0, 1, 2], [3]]] * 2, 4)
    for placement, words in (
        (replicas, "6 slots a layer for 4 experts.*without --redundant"),
        (unequal, "gives devices 1 to 3 slots.*without --slots"),
        (None, "decides no placement"),
    ):
        assert_refused(UsageError, words, source, tmp_path, made_plan(Cluster(1, 2), spec(), placement))


def test_plans_of_another_model_are_refused(source: Path, tmp_path: Path) -> None:
    other = plan_of(spec(6), [[0, 2, 4, 1, 3, 5]] * 2)
    assert_refused(MismatchError, "the plan is of 6 experts a layer, the checkpoint has 4", source, tmp_path, other)
    fewer = plan_of(spec(4, (0,)), ROWS[:1])
    assert_refused(MismatchError, "experts in hidden layer 1, of which the plan knows", source, tmp_path, fewer)
    more = plan_of(spec(4, (0, 1, 2)), [*ROWS, ROWS[0]])
    assert_refused(InputError, "no experts of hidden layer 2", source, tmp_path, more)


def test_groups_known_to_the_plan_alone_are_kept_too(source: Path, tmp_path: Path) -> None:
    model = spec(num_expert_groups=2, top_k_groups=1)
    assert_refused(UsageError, "--groups whole", source, tmp_path, plan_of(model, ROWS))
    permute(plan_of(model, [[2, 3, 0, 1]] * 2), source, tmp_path / "permuted")


def test_a_permuted_checkpoint_is_not_permuted_again(source: Path, tmp_path: Path) -> None:
    permute(PLAN, source, tmp_path / "permuted")
    with pytest.raises(UsageError, match="permuted already; undo that first: moeplan apply --undo"):
        permute(PLAN, tmp_path / "permuted", tmp_path / "again")


RECORDS = {
    "{": "not the permutation of a checkpoint",
    "[]": "not the permutation of a checkpoint",
    '{"schema_version": 2}': "schema version 2",
    '{"0": [0, 0, 1, 2], "1": [3, 1, 0, 2]}': "layer 0 is no permutation of 4 experts",
    '{"0": [0, 1], "1": [3, 1, 0, 2]}': "expected one number",
    "{}": "0 layers of",
    '{"0": [0, 1, 2, 3], "7": [3, 1, 0, 2]}': "no experts of hidden layer 7",
    '{"0": [0, 1, 2], "1": [2, 1, 0]}': "where 3 experts were expected first|expected experts 0 to 2",
    '{"0": [], "1": []}': "expected",
    '{"-1": [0, 1], "1": [1, 0]}': "no experts of hidden layer -1|expected",
}


@pytest.mark.parametrize("content", RECORDS)
def test_a_permutation_that_is_damaged_or_of_another_model_undoes_nothing(
    content: str, source: Path, tmp_path: Path
) -> None:
    permute(PLAN, source, tmp_path / "permuted")
    record = tmp_path / "permuted" / "moeplan-permutation.json"
    text = content
    if content[-1] == "}" and "schema" not in content:
        permutation = json.loads(content)
        changed = {"permutation": permutation, "permutation_sha256": sha256_json(permutation)}
        text = json.dumps(json.loads(record.read_text()) | changed)
    record.write_text(text)
    with pytest.raises(InputError, match=RECORDS[content]):
        undo(tmp_path / "permuted", tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


def test_a_permutation_that_was_changed_undoes_nothing(source: Path, tmp_path: Path) -> None:
    permute(PLAN, source, tmp_path / "made")
    record = tmp_path / "made" / "moeplan-permutation.json"
    content = json.loads(record.read_text())
    for permutation in ({"0": [1, 0, 2, 3], "1": [0, 1, 2, 3]}, {"0": content["permutation"]["0"]}):
        record.write_text(json.dumps(content | {"permutation": permutation}))
        with pytest.raises(InputError, match="the permutation was changed, its hash is another"):
            undo(tmp_path / "made", tmp_path / "restored")
    record.write_text(" " * (4 * 2**20 + 1))
    with pytest.raises(InputError, match=r"4,194,305 bytes, expected the permutation of a checkpoint of at most"):
        undo(tmp_path / "made", tmp_path / "restored")


def test_what_was_never_permuted_is_not_undone(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no moeplan-permutation\.json; expected a checkpoint"):
        undo(source, tmp_path / "restored")
