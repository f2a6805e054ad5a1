"""The examples, run as they stand under torchrun in a folder with a plan."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moeplan.planner.demo.model import load_embedded
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.decisions import Decisions, PipelineDecision, PlacementDecision, SamplePolicyDecision
from moeplan.runtime.plan import Inputs, Plan, save
from moeplan.solvers import contiguous
from moeplan.solvers.placement import ReplicaRule
from tests.runtime.plans import eager

EXAMPLES = Path(__file__).parents[1] / "examples"
MOEPLAN = [sys.executable, "-m", "moeplan.planner.cli"]
STEPS = 6


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def written(folder: Path, ranks: int, *beside: str, **options: Any) -> Path:
    """A plan for the embedded model: a placement, and beside it what is asked for."""
    model, cluster = load_embedded().config.spec(), Cluster(1, ranks)
    slots = model.num_experts // ranks + ("rebalancing" in beside)
    placed = contiguous.solve(model.num_layers, model.num_experts, cluster, slots=slots).placement
    placement = PlacementDecision.of(placed)
    possible = {
        "rebalancing": eager(placement.model_copy(update={"replica_rule": ReplicaRule.QUOTA})),
        "pipeline": PipelineDecision(forward=(2,) * model.num_layers, backward=None),
        "sample_policy": SamplePolicyDecision(method="paper", layers=model.layer_ids),
    }
    beside_it: dict[str, Any] = {name: possible[name] for name in beside}
    facts: dict[str, Any] = {"strategies": (), "seed": 0, "cluster": cluster, "model": model, "options": options}
    decisions = Decisions(placement=None if "rebalancing" in beside else placement, **beside_it)
    save(Plan.make(inputs=Inputs(), decisions=decisions, **facts), folder / "plan.json")
    return folder / "plan.json"


def run(command: list[object], folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.check_output([*map(str, command)], cwd=folder, env=environment, text=True, timeout=200)


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)$", output, re.MULTILINE)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one rank."""
    folder = tmp_path_factory.mktemp("alone")
    plan = written(folder, 1)
    return losses(run([*torchrun(1), EXAMPLES / "train.py", "--plan", plan, "--steps", STEPS], folder))


def test_apply_starts_the_training_example_which_finds_the_plan(alone: list[float], tmp_path: Path) -> None:
    command = [*torchrun(4), EXAMPLES / "train.py", "--steps", STEPS, "-o", "trained.pt"]
    found = losses(run([*MOEPLAN, "apply", written(tmp_path, 4, "pipeline"), "--", *command], tmp_path))
    assert len(found) == STEPS
    assert found == pytest.approx(alone, rel=1e-4)
    assert found[-1] < found[0]
    before, trained = load_embedded().state_dict(), torch.load(tmp_path / "trained.pt", weights_only=True)
    assert list(trained) == list(before)
    for name, weights in before.items():
        rows = trained[name] - weights
        assert (rows.flatten(1).abs().amax(1) if "experts" in name else rows.abs()).max() > 0


def test_in_the_training_example_labels_follow_their_samples(alone: list[float], tmp_path: Path) -> None:
    plan = written(tmp_path, 2, "sample_policy")
    found = losses(run([*torchrun(2), EXAMPLES / "train.py", "--plan", plan, "--steps", STEPS], tmp_path))
    assert found == pytest.approx(alone, rel=1e-4)


def test_in_the_training_example_replicas_follow_the_load_in_memory_that_layers_share(
    alone: list[float], tmp_path: Path
) -> None:
    plan = written(tmp_path, 2, "rebalancing")
    command = [*torchrun(2), EXAMPLES / "train.py", "--plan", plan, "--steps", STEPS, "--replica-memory", "shared"]
    output = run(command, tmp_path)
    assert losses(output) == pytest.approx(alone, rel=1e-4)
    assert re.search(r"^[1-9]\d* changes of placements that follow the load$", output, re.MULTILINE)
    assert re.search(r"^replicas take [\d.]+ MB here, -?[\d.]+ less than resident ones$", output, re.MULTILINE)


def test_the_commands_of_the_flexmoe_page_train_under_a_plan_of_a_recorded_training(tmp_path: Path) -> None:
    written(tmp_path, 2)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    page = (EXAMPLES.parent / "docs" / "flexmoe.md").read_text()
    ways = {"torchrun": torchrun(2)[:-2], "moeplan": MOEPLAN}
    lines = page.partition("```\ntorchrun")[2].partition("```")[0].splitlines()
    commands = [line.split() for line in ("torchrun" + lines[0], *lines[1:])]
    recorded, solved, trained = [run([*ways[program], *words], tmp_path) for program, *words in commands]
    assert len(losses(recorded)) == len(losses(trained)) == 12
    assert losses(trained) == pytest.approx(losses(recorded), rel=1e-4)
    assert "on 6 unseen steps" in " ".join(solved.split())
    assert re.search(r"^\d+ changes of placements that follow the load$", trained, re.MULTILINE)


@pytest.mark.parametrize("dispatch", ["standard", "coherent"])
def test_the_generation_example_continues_every_prompt_as_one_rank_does(dispatch: str, tmp_path: Path) -> None:
    model, prompt = load_embedded(), b"The import statement"
    for _ in range(8):
        with torch.inference_mode():
            prompt += bytes([int(model(torch.tensor([list(prompt)]))[0, -1].argmax())])
    plan = written(tmp_path, 2, placement={"dispatch_model": dispatch})
    output = run([*torchrun(2), EXAMPLES / "generate.py", "--plan", plan, "--tokens", 8], tmp_path).splitlines()
    assert len(output) == 9
    assert output[0] == repr(prompt.decode(errors="replace"))
    assert re.fullmatch(r"rank 0 sent [1-9]\d* copies and held [1-9]\d* bytes of keys and values", output[-1])
