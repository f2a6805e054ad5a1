"""Plans that no checkpoint can carry, and permutations that undo nothing: one line each, and nothing written."""

import json
from pathlib import Path

import pytest

from moeplan.errors import InputError, MismatchError, UsageError
from moeplan.files import sha256_json
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.checkpoints import permute, undo
from moeplan.runtime.decisions import Decisions, PlacementDecision
from moeplan.runtime.plan import Inputs, Plan
from moeplan.solvers.placement import Placement
from tests.runtime.checkpoints.made_checkpoints import (
    assert_refused,
    expert_tensors,
    plan_of,
    spec,
    write_checkpoint,
)

ROWS = [[2, 0, 3, 1], [3, 1, 0, 2]]


def test_plans_that_no_checkpoint_can_carry_are_refused_with_what_helps(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", expert_tensors((0, 1), 4))
    replicas = Placement.from_sets([[[0, 1, 2], [1, 2, 3]]] * 2, 4)
    unequal = Placement.from_sets([[[0, 1, 2], [3]]] * 2, 4)
    assert_refused(UsageError, "6 slots a layer for 4 experts.*without --redundant", source, tmp_path, _with(replicas))
    assert_refused(UsageError, "gives devices 1 to 3 slots.*without --slots", source, tmp_path, _with(unequal))
    assert_refused(UsageError, "decides no placement", source, tmp_path, _with(None))


def test_plans_of_another_model_are_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", expert_tensors((0, 1), 4))
    other = plan_of(spec(6), [[0, 2, 4, 1, 3, 5]] * 2)
    assert_refused(MismatchError, "the plan is of 6 experts a layer, the checkpoint has 4", source, tmp_path, other)
    fewer = plan_of(spec(4, (0,)), ROWS[:1])
    assert_refused(MismatchError, "experts in hidden layer 1, of which the plan knows", source, tmp_path, fewer)
    more = plan_of(spec(4, (0, 1, 2)), [*ROWS, ROWS[0]])
    assert_refused(InputError, "no experts of hidden layer 2", source, tmp_path, more)


def test_groups_known_to_the_plan_alone_are_kept_too(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", expert_tensors((0, 1), 4))
    model = spec(num_expert_groups=2, top_k_groups=1)
    assert_refused(UsageError, "--groups whole", source, tmp_path, plan_of(model, ROWS))
    permute(plan_of(model, [[2, 3, 0, 1]] * 2), source, tmp_path / "permuted")


def test_a_permuted_checkpoint_is_not_permuted_again(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", expert_tensors((0, 1), 4))
    permute(plan_of(spec(), ROWS), source, tmp_path / "permuted")
    with pytest.raises(UsageError, match="permuted already; undo that first: moeplan apply --undo"):
        permute(plan_of(spec(), ROWS), tmp_path / "permuted", tmp_path / "again")


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
def test_a_permutation_that_is_damaged_or_of_another_model_undoes_nothing(content: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", expert_tensors((0, 1), 4))
    permute(plan_of(spec(), ROWS), source, tmp_path / "permuted")
    record = tmp_path / "permuted" / "moeplan-permutation.json"
    text = content
    if content[-1] == "}" and "schema" not in content:
        found = json.loads(content)
        changed = {"permutation": found, "permutation_sha256": sha256_json(found)}
        text = json.dumps(json.loads(record.read_text()) | changed)
    record.write_text(text)
    with pytest.raises(InputError, match=RECORDS[content]):
        undo(tmp_path / "permuted", tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


def test_a_permutation_that_was_changed_undoes_nothing(tmp_path: Path) -> None:
    permute(plan_of(spec(), ROWS), write_checkpoint(tmp_path / "source", expert_tensors((0, 1), 4)), tmp_path / "made")
    record = tmp_path / "made" / "moeplan-permutation.json"
    content = json.loads(record.read_text())
    for found in ({"0": [1, 0, 2, 3], "1": [0, 1, 2, 3]}, {"0": content["permutation"]["0"]}):
        record.write_text(json.dumps(content | {"permutation": found}))
        with pytest.raises(InputError, match="the permutation was changed, its hash is another"):
            undo(tmp_path / "made", tmp_path / "restored")
    record.write_text(" " * (4 * 2**20 + 1))
    with pytest.raises(InputError, match=r"4,194,305 bytes, expected the permutation of a checkpoint of at most"):
        undo(tmp_path / "made", tmp_path / "restored")


def test_what_was_never_permuted_is_not_undone(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", expert_tensors((0, 1), 4))
    with pytest.raises(InputError, match=r"no moeplan-permutation\.json; expected a checkpoint"):
        undo(source, tmp_path / "restored")


def _with(placement: Placement | None) -> Plan:
    made = Decisions(placement=None if placement is None else PlacementDecision.of(placement))
    return Plan.make(strategies=("eplb",), seed=0, cluster=Cluster(1, 2), model=spec(), inputs=Inputs(), decisions=made)
