"""The plugin for vLLM as vLLM runs it: found on PYTHONPATH by its entry point, in a process without moeplan."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moeplan.runtime.exports import export
from tests.runtime.exports.engine_plans import model_of, plan_of

POLICY = """
import torch
class Abstract: pass
class Stock(Abstract):
    @classmethod
    def helper(cls): return "stock"
    @classmethod
    def rebalance_experts(cls, weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices=None):
        return torch.full((weight.shape[0], num_replicas), -1)
EPLB_POLICIES = {"default": Stock}
"""
RUN = """
import importlib.abc, importlib.metadata, json, logging, sys, types
class NoMoeplan(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "moeplan":
            raise ImportError(name)
sys.meta_path.insert(0, NoMoeplan())
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
(point,) = importlib.metadata.entry_points(group="vllm.general_plugins")
register = point.load()
register()
from vllm.distributed.eplb import policy as module
first = module.EPLB_POLICIES["default"]
register()
policy = module.EPLB_POLICIES["default"]
import torch
old = torch.zeros(1)
answers = []
for layers, experts, slots, ranks in json.loads(sys.argv[1]):
    weight = torch.ones((layers, experts))
    for _ in range(2):
        answer = policy.rebalance_experts(weight, slots, 1, 1, ranks, old)
        answers.append(answer.tolist())
        answer.fill_(7)
print(json.dumps({"name": point.name, "answers": answers, "kept": policy is first,
    "stock": issubclass(policy, module.Stock) and policy.helper() == "stock",
    "dtype": str(answer.dtype), "device": str(answer.device)}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `apply --engine vllm` writes for three layers of eight experts in 12 slots on 4 devices."""
    target = tmp_path_factory.mktemp("plugin") / "out"
    export(plan_of(slots=3, model=model_of(layers=3)), "vllm", target)
    return target


def asked(folder: Path, tmp_path: Path, questions: list[list[int]], version: str = "0.33.0") -> tuple[Any, str]:
    """What a process of a stand-in for vLLM answers, and its log."""
    package = tmp_path / "site" / "vllm" / "distributed" / "eplb"
    package.mkdir(parents=True)
    for place in (package, package.parent, package.parents[1]):
        (place / "__init__.py").touch()
    (package / "policy.py").write_text(POLICY)
    information = tmp_path / "site" / f"vllm-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    path = os.pathsep.join([str(folder), str(tmp_path / "site")])
    command = [sys.executable, "-c", RUN, json.dumps(questions)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_it_answers_with_the_plan_for_its_model_and_as_before_elsewhere(folder: Path, tmp_path: Path) -> None:
    rows = json.loads((folder / "expert_map.json").read_text())
    others = [[2, 8, 12, 4], [3, 9, 12, 4], [3, 8, 16, 4], [3, 8, 12, 2]]  # a drafter, another model, elastic scaling
    said, log = asked(folder, tmp_path, [[3, 8, 12, 4], *others], version="0.33.0+cu129")
    stock = [[[-1] * slots] * layers for layers, _, slots, _ in others for _ in range(2)]
    assert said["answers"] == [rows, rows, *stock]
    assert (said["name"], said["kept"], said["stock"]) == ("moeplan_plan", True, True)
    assert (said["dtype"], said["device"]) == ("torch.int64", "cpu")
    assert log.count("INFO moeplan: placement of 3 layers with 12 slots on 4 ranks is ready") == 1
    assert log.count("WARNING moeplan: no plan for") == len(others)
    assert "tried with" not in log


def test_it_warns_of_a_version_that_it_was_not_tried_with(folder: Path, tmp_path: Path) -> None:
    said, log = asked(folder, tmp_path, [[3, 8, 12, 4]], version="0.34.1")
    assert said["answers"][0] == json.loads((folder / "expert_map.json").read_text())
    assert "WARNING moeplan: tried with vLLM 0.33.0, and this is 0.34.1" in log
