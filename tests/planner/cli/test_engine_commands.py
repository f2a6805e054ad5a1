"""`apply --engine` and `validate` as a user runs them, one after the other."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from moeplan.planner.cli.commands import group
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.exports import ENGINES
from moeplan.runtime.plan import Plan, save

DOCS = Path(__file__).parents[3] / "docs" / "engines"
CONFIG = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1,
    "hidden_size": 64,
}


@pytest.fixture(scope="module")
def plan(make_trace: Any) -> Plan:
    """Three layers of eight experts in twelve slots on four devices, in the order of the checkpoint: no benefit."""
    trace = str(make_trace(layers=3, experts=8).path)
    return solve(Request.of(strategy="contiguous", trace=trace, cluster=Cluster.parse("1x4"), slots=3))


@pytest.fixture
def home(plan: Plan, tmp_path: Path) -> Path:
    """A directory with the plan and the config.json of its model."""
    save(plan, tmp_path / "plan.json")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "mixtral.json").write_text(json.dumps(CONFIG | {"model_type": "mixtral"}))
    return tmp_path


def test_a_plan_becomes_an_engine_s_files_and_they_are_sound(moeplan: Any, home: Path) -> None:
    args = ("apply", "plan.json", "--engine", "tensorrt-llm", "-o", "out", "--hf-config", "config.json")
    lines = moeplan(*args, cwd=home).stdout.splitlines()
    assert lines[-2] == "start"
    assert lines[-1].startswith("trtllm-serve ")
    assert str(home / "out" / "extra_config.yaml") in lines[-1]
    assert any("no benefit expected" in line for line in lines)
    assert any("round_robin" in line for line in lines)
    assert not (home / ".moeplan").exists()
    asked = ("--hf-config", "config.json", "--ep-size", 4, "--redundant", 4)
    said = moeplan("validate", "out", "--engine", "tensorrt-llm", *asked, cwd=home).stdout
    assert said == "out is sound for tensorrt-llm: 3 MoE layers\n"
    bad = moeplan("validate", "config.json", "--engine", "sglang", *asked, "--json", cwd=home, code=3)
    assert len(json.loads(bad.stdout)["findings"]) == 1
    assert bad.stderr.count("\n") == 1


def test_a_plan_for_an_engine_as_json(moeplan: Any, home: Path) -> None:
    said = json.loads(moeplan("apply", "--engine", "vllm", "-o", "new/out", "--json", cwd=home).stdout)
    assert (said["engine"], said["directory"], said["replica_rule"]) == ("vllm", "new/out", "even")
    assert all((home / "new" / "out" / file).is_file() for file in said["files"])
    assert said["command"].startswith(f"PYTHONPATH={home}/new/out")
    assert said["conditions"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--engine", "sglang"), "goes with one of --engine"),
        (("--engine", "sglang", "-o", "out"), "--hf-config"),
        (("--engine", "sglang", "-o", "out", "--hf-config", "mixtral.json"), "Mixtral has no expert-location hook"),
    ],
)
def test_a_request_that_cannot_be_met_leaves_nothing(
    args: tuple[str, ...], said: str, moeplan: Any, home: Path
) -> None:
    done = moeplan("apply", "plan.json", *args, cwd=home, code=2)
    assert said in done.stderr
    assert sorted(path.name for path in home.iterdir()) == ["config.json", "mixtral.json", "plan.json"]


@pytest.mark.parametrize("command", ["apply", "validate"])
def test_the_help_names_every_engine(command: str) -> None:
    (option,) = [option for option in group.load(command).params if option.name == "engine"]
    assert all(name in option.help for name in ENGINES)


def test_the_commands_of_the_engine_pages_are_real() -> None:
    pages = sorted(DOCS.glob("*.md"))
    blocks = [block for page in pages for block in page.read_text().split("```")[1::2]]
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("moeplan ")]
    assert len(pages) > len(ENGINES)
    assert len(lines) > 2 * len(ENGINES)
    for line in lines:
        words = shlex.split(line)[1:]
        command = group.load(words[0])
        command = command.load(words[1]) if words[0] == "trace" else command
        known = {flag for option in command.params for flag in option.opts}
        assert {word for word in words if word.startswith("-")} <= known, line
