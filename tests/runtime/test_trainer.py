"""Hugging Face's Trainer under a plan on two ranks, against the Trainer alone."""

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moeplan.errors import UsageError
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.decisions import PlacementDecision
from moeplan.runtime.plan import Plan, save
from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.traces.model import ModelSpec
from tests.profilers.world.test_launch import environment
from tests.runtime.plans import eager, made_plan
from tests.warm import warm

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
pytest.importorskip("transformers")

STEPS, SAVED_AT = 12, 6
HELD = [[[3, 1, 7, 0, 2], [5, 6, 4, 3, 1]], [[7, 0, 2, 4, 1], [6, 5, 3, 1, 0]]]  # with replicas


@dataclass(frozen=True)
class Run:
    """Losses and norms `[steps, 2]`, and the folder of what was saved."""

    logged: np.ndarray
    folder: Path

    def weights(self, name: str) -> dict[str, np.ndarray]:
        from safetensors.numpy import load_file

        tensors: dict[str, np.ndarray] = load_file(self.folder / name / "model.safetensors")
        return tensors


MODEL = ModelSpec(name="mixtral", layer_ids=(0, 1), num_experts=8, top_k=2, hidden_size=32)


def plan(**options: Any) -> Plan:
    return made_plan(Cluster(1, 2), MODEL, Placement.from_sets(HELD, 8, ReplicaRule.NEAREST), options=options)


def following(horizon: float = 300.0) -> Plan:
    """A plan whose replicas follow the load at every step."""
    start = Placement.from_sets(HELD, 8, ReplicaRule.QUOTA)
    return made_plan(Cluster(1, 2), MODEL, rebalancing=eager(PlacementDecision.of(start), horizon_steps=horizon))


Train = Callable[..., Run]


@pytest.fixture(scope="module")
def train() -> Iterator[Train]:
    """Train in this folder on so many ranks, alone without a plan."""
    with warm("tests.runtime.trainer_cases", "main", env=environment(HF_HUB_OFFLINE="1")) as start:

        def run(
            folder: Path, ranks: int, *, checkpoint: Path | None = None, given: Plan | None = None, **options: Any
        ) -> Run:
            save(given or plan(), folder.with_suffix(".json"))
            written = str(folder.with_suffix(".json")) if ranks > 1 else "none"
            arguments = [
                str(STEPS),
                str(SAVED_AT),
                str(folder),
                written,
                str(checkpoint or "none"),
                json.dumps(options),
            ]
            done = start(arguments, folder.parent, environment(HF_HUB_OFFLINE="1", **(world() if ranks > 1 else {})))
            assert done.returncode == 0, done.stderr
            return Run(np.array(json.loads((folder / "logged.json").read_text())), folder)

        yield run


def world() -> dict[str, str]:
    """The environment of rank 0 of two."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}


@pytest.fixture(scope="module")
def alone(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("trainer") / "alone", 1)


@pytest.fixture(scope="module")
def spread(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("trainer") / "spread", 2)


def same(weights: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return list(weights) == list(expected) and all(
        np.allclose(weights[name], expected[name], rtol=0, atol=1e-13) for name in expected
    )


def test_losses_and_norms_are_those_of_the_trainer_alone(alone: Run, spread: Run) -> None:
    assert spread.logged.shape == (STEPS, 2)
    assert np.allclose(spread.logged[:, 0], alone.logged[:, 0], rtol=1e-6)  # the Trainer sums losses in float32
    assert np.allclose(spread.logged[:, 1], alone.logged[:, 1], rtol=1e-12)
    assert spread.logged[:, 1].max() > 0.5  # what max_grad_norm cuts


def test_what_is_saved_after_training_is_the_whole_model_under_the_names_of_the_hub(alone: Run, spread: Run) -> None:
    assert same(spread.weights("final"), alone.weights("final"))


def test_replicas_follow_the_load_with_nothing_but_the_callback(train: Train, alone: Run, tmp_path: Path) -> None:
    moved = train(tmp_path / "moved", 2, given=following())
    (changes,) = json.loads((moved.folder / "changes.json").read_text())
    assert len({step for step, _ in changes}) > STEPS // 2
    assert np.allclose(moved.logged[:, 0], alone.logged[:, 0], rtol=1e-6)
    assert np.allclose(moved.logged[:, 1], alone.logged[:, 1], rtol=1e-12)
    assert same(moved.weights("final"), alone.weights("final"))
    resumed = train(tmp_path / "resumed", 2, given=following(), checkpoint=moved.folder / f"checkpoint-{SAVED_AT}")
    assert same(resumed.weights("final"), alone.weights("final"))
    assert json.loads((resumed.folder / "changes.json").read_text()) == [changes]
    other = train(tmp_path / "other", 2, given=following(200.0), checkpoint=moved.folder / f"checkpoint-{SAVED_AT}")
    assert same(other.weights("final"), alone.weights("final"))
    (anew,) = json.loads((other.folder / "changes.json").read_text())
    assert max(step for step, _ in anew) <= STEPS - SAVED_AT


def test_the_callback_hands_on_how_many_experts_move_a_schedule_and_where_replicas_are(
    train: Train, alone: Run, tmp_path: Path
) -> None:
    asked = {"usual": {}, "asked": {"moves_per_step": 1, "replica_memory": "shared"}}
    usual, other = (train(tmp_path / name, 2, given=following(), **options) for name, options in asked.items())
    assert same(other.weights("final"), alone.weights("final"))
    for name in ("changes", "replicas"):
        (ours,), (theirs,) = (json.loads((run.folder / f"{name}.json").read_text()) for run in (usual, other))
        assert ours != theirs, name
    still = train(tmp_path / "still", 2, given=following(), schedule={})
    assert json.loads((still.folder / "changes.json").read_text()) == [[]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_resumes_from_a_checkpoint_with_and_without_a_plan(
    ranks: int, train: Train, alone: Run, spread: Run, tmp_path: Path
) -> None:
    resumed = train(tmp_path / "resumed", ranks, checkpoint=spread.folder / f"checkpoint-{SAVED_AT}")
    assert np.allclose(resumed.logged[-SAVED_AT:], alone.logged[-SAVED_AT:], rtol=1e-6)
    assert same(resumed.weights("final"), alone.weights("final"))


@pytest.mark.parametrize(
    ("options", "arguments", "told"),
    [
        ({"placement": {"dispatch_model": "coherent"}}, {}, "dispatch model 'coherent' under the Trainer"),
        ({}, {"fsdp": "full_shard"}, "a plan beside the Trainer's own fsdp"),
        ({}, {"fp16": True}, "fp16 under the Trainer"),
        ({}, {"deepspeed": "zero.json"}, "a plan beside the Trainer's own fsdp"),
    ],
)
def test_what_the_trainer_cannot_do_is_refused(options: dict[str, Any], arguments: dict[str, Any], told: str) -> None:
    from moeplan.runtime.trainer import PlanCallback

    given = SimpleNamespace(**{"fsdp": "", "deepspeed": None, "fp16": False, **arguments})
    with pytest.raises(UsageError, match=told):
        PlanCallback(plan(**options)).on_init_end(given, None, None, model=None)  # type: ignore[arg-type]
