"""Exports as the engines' own code reads them; each engine in a process of its own, without moeplan's packages."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.runtime.exports import ENGINES, Expected, export, validate
from moeplan.runtime.plan import Plan
from moeplan.solvers.replicas import ReplicaTable
from tests.builders import known
from tests.runtime.exports.engine_plans import expected_of, model_of, plan_of

HERE = Path(__file__).parent
DEEPSEEK = model_of(layers=58, experts=256, dense=3, mtp=1, top_k=8)
Ask = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def deepseek() -> Plan:
    """58 layers of 256 experts, in 288 slots on 32 devices."""
    return plan_of(cluster="4x8", slots=9, model=DEEPSEEK)


@pytest.fixture
def ask(engine_wheels: Path) -> Ask:
    """`ask(script, engine, *words, path=...)`: the finished process of a script beside the engine's wheel."""

    def run(
        script: str, engine: str, *words: object, path: tuple[Path, ...] = ()
    ) -> "subprocess.CompletedProcess[str]":
        wheel = engine_wheels / f"{engine}-{ENGINES[engine].version}.dist-info"
        if not wheel.is_dir():
            pytest.skip(f"{engine} {ENGINES[engine].version} absent: {wheel}; make test-engines downloads it")
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, engine_wheels)))}
        command = [sys.executable, str(HERE / script), *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ, check=False)

    return run


def answer(done: "subprocess.CompletedProcess[str]") -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def read_by_sglang(ask: Ask, plan: Plan, folder: Path, *, asked: int = 1) -> Any:
    """What SGLang makes of a plan's file, on its first ranks."""
    export(plan, "sglang", folder)
    placement, model, cluster = known(plan.placement), plan.model, plan.cluster
    redundant = placement.num_slots - model.num_experts
    sizes = (cluster.num_devices, cluster.num_nodes, model.num_hidden_layers, model.num_experts, redundant, asked)
    return answer(ask("sglang_parser.py", "sglang", folder / "expert_location.json", *sizes))


@pytest.mark.parametrize("small", [False, True])
def test_sglang_reads_the_plan(small: bool, ask: Ask, deepseek: Plan, tmp_path: Path) -> None:
    plan = plan_of(slots=3, model=model_of(layers=3, dense=2)) if small else deepseek
    said = read_by_sglang(ask, plan, tmp_path / "out")
    placement, model, first = known(plan.placement), plan.model, plan.model.layer_ids[0]
    assert said["map"][first:] == placement.physical_to_logical.tolist()
    assert said["map"][:first] == [[slot % model.num_experts for slot in range(placement.num_slots)]] * first
    assert said["ranks"] == placement.num_devices


@pytest.mark.parametrize("cluster", ["1x6", "2x4", "3x2"])
def test_the_static_rule_is_what_sglang_s_ranks_choose(cluster: str, ask: Ask, tmp_path: Path) -> None:
    plan = plan_of(cluster=cluster, slots=4, model=model_of(layers=4, experts=8, dense=0))
    ranks, placement = plan.cluster.num_devices, known(plan.placement)
    slots_RLE = np.array(read_by_sglang(ask, plan, tmp_path / "out", asked=ranks)["dispatch"])
    for layer in range(4):
        theirs_ED = placement.device_of_slot[slots_RLE[:, layer].T]
        table = ReplicaTable.of(placement, layer, plan.cluster.devices_per_node, "static")
        ids_E1, none_E = np.arange(8)[:, None], np.zeros(8, np.int64)
        ours_ED = np.stack([table.choose(ids_E1, np.full(8, home), none_E)[:, 0] for home in range(ranks)], axis=1)
        for expert, held_D in enumerate(placement.holds(layer)):
            drawn_D = _drawn(held_D, plan.cluster.devices_per_node)
            assert (ours_ED[expert] == theirs_ED[expert])[~drawn_D].all()
            assert held_D[theirs_ED[expert]].all()
            each = np.bincount(ours_ED[expert][drawn_D], minlength=ranks)[held_D]  # theirs: so in the mean
            assert each.max() - each.min() <= 1
            assert each.sum() == drawn_D.sum()


def _drawn(held_D: NDArray[np.bool_], devices_per_node: int) -> NDArray[np.bool_]:
    """The devices that draw among all replicas: they hold none, and their node holds none or all of them."""
    near_D = np.repeat(held_D.reshape(-1, devices_per_node).sum(axis=1), devices_per_node)
    drawn_D: NDArray[np.bool_] = ~held_D & ((near_D == 0) | (near_D == held_D.sum()))
    return drawn_D


ROW = [slot % 256 for slot in range(288)]
FAULTS: dict[str, tuple[list[list[Any]], bool]] = {  # rows, and whether SGLang takes them
    "58 rows": ([ROW] * 58, True),
    "287 wide": ([ROW[:287]] * 61, True),
    "256 wide": ([ROW[:256]] * 61, True),
    "id -1": ([[*ROW[:287], -1]] * 61, True),
    "duplicates": ([[0, 0, *ROW[2:287], 1]] * 61, True),
    "extra key": ([ROW] * 61, False),
    "id 999": ([[*ROW[:287], 999]] * 61, False),
    "missing expert": ([[0 if expert == 7 else expert for expert in ROW]] * 61, False),
    "fractions": ([[float(expert) for expert in ROW]] * 61, False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_sglang_takes_or_refuses_is_always_a_finding(fault: str, ask: Ask, tmp_path: Path) -> None:
    (rows, taken), file = FAULTS[fault], tmp_path / "expert_location.json"
    file.write_text(json.dumps({"physical_to_logical_map": rows} | ({"model": "x"} if fault == "extra key" else {})))
    done = ask("sglang_parser.py", "sglang", file, 32, 4, 61, 256, 32, 1)
    assert (done.returncode == 0) == taken, done.stderr
    assert validate(file, "sglang", Expected(model=DEEPSEEK, num_devices=32, redundant=32)) != []


def test_vllm_finds_the_plugin_and_rearranges_to_the_plan(ask: Ask, deepseek: Plan, tmp_path: Path) -> None:
    export(deepseek, "vllm", tmp_path / "out")
    done = ask("vllm_plugins.py", "vllm", 58, 256, 288, 32, path=(tmp_path / "out",))
    said = answer(done)
    assert said["rows"] == known(deepseek.placement).physical_to_logical.tolist()
    assert said["rows"] != said["stock"]
    assert said["is_policy"]
    assert said["like_stock"] == [True, True, True]
    assert "placement of 58 layers with 288 slots on 32 ranks is ready" in done.stderr
    assert "tried with" not in done.stderr
    assert validate(tmp_path / "out", "vllm", expected_of(deepseek)) == []


def test_vllm_s_own_policy_answers_for_other_models(ask: Ask, deepseek: Plan, tmp_path: Path) -> None:
    export(deepseek, "vllm", tmp_path / "out")
    done = ask("vllm_plugins.py", "vllm", 1, 256, 288, 32, path=(tmp_path / "out",))
    said = answer(done)
    assert said["replaced"]
    assert said["rows"] == said["stock"]
    assert "no plan for layers, experts, slots, ranks (1, 256, 288, 32)" in done.stderr


def test_without_the_folder_on_its_path_vllm_is_as_it_was(ask: Ask) -> None:
    assert not answer(ask("vllm_plugins.py", "vllm", 2, 8, 12, 4))["replaced"]
