"""Models of every family: equal logits from the permuted checkpoint, every tensor where it belongs, all undone."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from moeplan.errors import UsageError
from moeplan.runtime.checkpoints import Permuted, permute, undo
from moeplan.runtime.plan import Plan
from moeplan.traces.huggingface.config import spec_of_config
from tests.runtime.checkpoints.made_checkpoints import (
    INDEX,
    assert_same,
    files_of,
    permuted_by_hand,
    plan_of,
    random_plan,
    read_tensors,
)
from tests.runtime.checkpoints.permuted_families import FAMILIES, logits_of, make_model

GROUPED = ("deepseek_v2", "deepseek_v3", "glm4_moe")


@dataclass(frozen=True)
class Case:
    """A model, its checkpoint in small shards, a plan and the checkpoint permuted by it."""

    family: str
    model: Any
    source: Path
    plan: Plan
    permuted: Permuted

    def loaded(self, folder: Path) -> Any:
        return type(self.model).from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """One family after another."""
    folder, model = tmp_path_factory.mktemp(request.param), make_model(request.param)
    model.save_pretrained(folder / "source", max_shard_size="24KB")
    plan = random_plan(spec_of_config(folder / "source" / "config.json"))
    permuted = permute(plan, folder / "source", folder / "permuted")
    return Case(request.param, model, folder / "source", plan, permuted)


def test_the_logits_are_those_of_the_original(case: Case) -> None:
    logits = logits_of(case.loaded(case.permuted.directory))
    torch.testing.assert_close(logits, logits_of(case.model), atol=1e-5, rtol=0)


def test_a_router_left_in_the_old_order_changes_the_logits(case: Case) -> None:
    spoiled, own = case.loaded(case.permuted.directory), dict(case.model.named_parameters())
    name = next(name for name in own if _is_router(name))
    with torch.no_grad():
        spoiled.get_parameter(name).copy_(own[name])
    assert (logits_of(spoiled) - logits_of(case.model)).abs().max() > 0.1


def test_every_tensor_is_what_a_permutation_by_hand_makes_of_it(case: Case) -> None:
    expected = permuted_by_hand(read_tensors(case.source), case.plan)
    assert_same(read_tensors(case.permuted.directory), expected)
    assert any(not torch.equal(tensor, expected[name]) for name, tensor in read_tensors(case.source).items())


def test_layers_span_several_files(case: Case) -> None:
    named = json.loads((case.source / INDEX).read_text())["weight_map"]
    layer = f"layers.{case.plan.model.layer_ids[0]}."
    assert len({file for name, file in named.items() if layer in name}) > 1


def test_undone_every_file_is_what_it_was_byte_for_byte(case: Case, tmp_path: Path) -> None:
    restored = undo(case.permuted.directory, tmp_path / "restored")
    assert restored.changed == ()
    assert files_of(tmp_path / "restored") == files_of(case.source)


def test_groups_torn_apart_are_refused_where_the_model_chooses_among_groups(case: Case, tmp_path: Path) -> None:
    if case.family not in GROUPED:
        assert case.plan.model.top_k_groups is None
        return
    row = [0, 2, 4, 6, 1, 3, 5, 7]
    torn = plan_of(case.plan.model, [row] * case.plan.model.num_layers)
    with pytest.raises(UsageError, match=r"tears groups of experts apart.* --groups whole"):
        permute(torn, case.source, tmp_path / "torn")
    assert not list(tmp_path.iterdir())


def _is_router(name: str) -> bool:
    return name.endswith((".gate.weight", ".router.weight", ".router.layer.weight"))
