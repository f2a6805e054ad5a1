"""Files for engines: each, read back, is the plan, what cannot be done is refused by name, and vLLM runs its plugin."""

import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings

from moeplan.errors import InputError, MismatchError, StorageError, UsageError
from moeplan.runtime.decisions import SamplePolicyDecision
from moeplan.runtime.exports import ENGINES, SIDECAR, export, strays, unserved, validate
from moeplan.runtime.plan import Plan
from moeplan.solvers.placement import ReplicaRule
from moeplan.solvers.replicas import ReplayRule
from moeplan.traces.model import ModelSpec
from tests.builders import known
from tests.runtime.exports.engine_plans import (
    ENGINES_OF_PLACEMENTS,
    degrees_plan,
    expected_of,
    model_of,
    plan_of,
    plans,
)


def trivial(plan: Plan) -> list[int]:
    return [slot % plan.model.num_experts for slot in range(known(plan.placement).num_slots)]


def rows_of(plan: Plan) -> list[list[int]]:
    rows: list[list[int]] = known(plan.placement).physical_to_logical.tolist()
    return rows


def check_sglang(plan: Plan, folder: Path) -> None:
    value = json.loads((folder / "expert_location.json").read_text())
    assert list(value) == ["physical_to_logical_map"]
    dense = [trivial(plan)] * plan.model.layer_ids[0]
    assert value["physical_to_logical_map"] == dense + rows_of(plan)


def check_vllm(plan: Plan, folder: Path) -> None:
    assert json.loads((folder / "expert_map.json").read_text()) == rows_of(plan)


def check_vllm_ascend(plan: Plan, folder: Path) -> None:
    value = json.loads((folder / "expert_map.json").read_text())
    assert set(value) == {"moe_layer_count", "layer_list"}
    assert value["moe_layer_count"] == plan.model.num_layers
    placement, devices = known(plan.placement), plan.cluster.num_devices
    for ordinal, layer in enumerate(value["layer_list"]):
        held = [{"device_id": rank, "device_expert": placement.held(ordinal, rank)} for rank in range(devices)]
        assert layer == {"layer_id": ordinal, "device_count": devices, "device_list": held}


def check_tensorrt_llm(plan: Plan, folder: Path) -> None:
    value = yaml.safe_load((folder / "moe_load_balancer.yaml").read_text())
    assert set(value) == {"num_slots", "initial_global_assignments", "layer_updates_per_iter"}
    assert (value["num_slots"], value["layer_updates_per_iter"]) == (len(trivial(plan)), 0)
    hidden, mtp = plan.model.num_hidden_layers or 0, plan.model.num_mtp_layers or 0
    planned = dict(zip(plan.model.layer_ids, rows_of(plan), strict=True))
    assert value["initial_global_assignments"] == planned | {hidden + k: trivial(plan) for k in range(mtp)}
    options = yaml.safe_load((folder / "extra_config.yaml").read_text())
    assert options == {
        "enable_attention_dp": True,
        "moe_config": {"load_balancer": str(folder / "moe_load_balancer.yaml")},
    }


CHECKS = {
    "sglang": check_sglang,
    "vllm": check_vllm,
    "vllm-ascend": check_vllm_ascend,
    "tensorrt-llm": check_tensorrt_llm,
}


@settings(max_examples=25)
@given(plan=plans())
def test_any_placement_comes_back_sound_with_a_sidecar_that_says_what_it_is(
    plan: Plan, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for engine, check in CHECKS.items():
        folder = tmp_path_factory.mktemp(engine) / "out"
        exported = export(plan, engine, folder)
        check(plan, folder)
        assert validate(folder, engine, expected_of(plan)) == []
        assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {*exported.files}
        said, devices = json.loads((folder / SIDECAR).read_text()), plan.cluster.num_devices
        assert (said["engine"], said["plan_sha256"], said["num_devices"]) == (engine, plan.plan_sha256, devices)
        assert (said["replica_rule"], said["command"]) == (ENGINES[engine].replica_rule, exported.command)
        assert said["conditions"] == list(exported.conditions) != []


def test_tutel_gets_a_degree_a_layer_and_says_where_the_placement_goes(tmp_path: Path) -> None:
    plan = degrees_plan((1, 2, 32))
    exported = export(plan, "tutel", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "degrees.json").read_text()) == {"a2a_ffn_overlap_degree": [1, 2, 32]}
    assert validate(tmp_path / "out", "tutel", expected_of(plan)) == []
    namespace: dict[str, Any] = {}
    exec(exported.command, namespace)  # the line to paste
    assert namespace["degrees"] == [1, 2, 32]
    placed = degrees_plan(placement=plan_of(model=model_of()).decisions.placement)
    assert any("--checkpoint" in said for said in export(placed, "tutel", tmp_path / "placed").conditions)


@pytest.mark.parametrize("engine", ENGINES_OF_PLACEMENTS)
@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (plan_of(slots=[2, 2, 3, 4]), "2 to 4 slots"),
        (plan_of(slots=[4, 0, 4, 4]), "device 1 of the plan has no slots"),
        (plan_of(dispatch="coherent"), "--dispatch standard"),
        (plan_of(dispatch="migrating"), "migrating dispatch"),
        (plan_of(sample_policy=SamplePolicyDecision(method="flow", layers=(0,))), "sample_policy"),
        (degrees_plan(), "the plan decides pipeline"),
    ],
)
def test_what_an_engine_cannot_carry_out_is_refused_by_name(engine: str, plan: Plan, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        export(plan, engine, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_degrees_beside_a_placement_and_unknown_mtp_layers_are_said_to_stay_behind(tmp_path: Path) -> None:
    def said(word: str, name: str, engine: str, plan: Plan) -> bool:
        return any(word in line for line in export(plan, engine, tmp_path / name).conditions)

    both, words = plan_of(pipeline=degrees_plan().decisions.pipeline), "pipeline degrees are not in the files"
    assert said(words, "both", "sglang", both)
    assert not said("pipeline", "one", "sglang", plan_of())
    assert said("MTP", "unknown", "tensorrt-llm", plan_of(model=model_of(mtp=None)))
    assert not said("MTP", "known", "tensorrt-llm", plan_of(model=model_of(mtp=0)))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sgl", "expected one of sglang, vllm"),
        ("megatron", "--checkpoint"),
        ("tutel", "pipeline degrees, and the plan decides placement"),
    ],
)
def test_an_engine_that_takes_no_such_file_is_refused_with_what_works(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        export(plan_of(), name, tmp_path / "out")


@pytest.mark.parametrize(("engine", "kind"), [("vllm", "gpt_oss"), ("sglang", "mixtral")])
def test_a_model_whose_files_an_engine_ignores_is_refused_as_by_validate(
    engine: str, kind: str, tmp_path: Path
) -> None:
    export(plan_of(), engine, tmp_path / "sound", model_type="qwen3_moe")
    (finding,) = validate(tmp_path / "sound", engine, expected_of(plan_of(), model_type=kind))
    with pytest.raises(UsageError, match="which ignores the file; a plan without replicas") as caught:
        export(plan_of(), engine, tmp_path / "out", model_type=kind)
    assert finding in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_degrees_that_validate_refuses_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="layer 1: degree 64; expected 1 to 32"):
        export(degrees_plan((1, 64, 2)), "tutel", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm"])
def test_hidden_layers_that_a_plan_does_not_know_come_from_the_model_s_config(engine: str, tmp_path: Path) -> None:
    ordinals = model_of(dense=0, num_hidden_layers=None, mtp=None)
    plan = plan_of(model=ordinals)
    with pytest.raises(UsageError, match="--hf-config"):
        export(plan, engine, tmp_path / "out")
    config = model_of(dense=2, mtp=1)
    export(plan, engine, tmp_path / "out", config=config)
    CHECKS[engine](plan.model_copy(update={"model": config}), tmp_path / "out")
    assert validate(tmp_path / "out", engine, expected_of(plan, model=config)) == []


@pytest.mark.parametrize("engine", ENGINES_OF_PLACEMENTS)
def test_mtp_layers_that_were_planned_go_where_the_engine_has_them(engine: str, tmp_path: Path) -> None:
    config = model_of(layers=2, dense=1, mtp=1)
    plan = plan_of(model=model_of(layers=3, dense=1, num_hidden_layers=None, mtp=None))  # hidden layers 1, 2 and MTP 3
    export(plan, engine, tmp_path / "out", config=config)
    assert validate(tmp_path / "out", engine, expected_of(plan, model=config)) == []
    if engine == "tensorrt-llm":
        value = yaml.safe_load((tmp_path / "out" / "moe_load_balancer.yaml").read_text())
        assert value["initial_global_assignments"] == dict(zip((1, 2, 3), rows_of(plan), strict=True))
    if engine == "vllm":
        assert json.loads((tmp_path / "out" / "expert_map.json").read_text()) == rows_of(plan)[:2]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (model_of(layers=4), "config.json has 8 in 4"),
        (model_of(experts=9), "config.json has 9 in 3"),
        (model_of(dense=2), r"8 in 3 \(2 to 4\)"),
        (model_of(layers=2, dense=0), "8 in 2"),
        (model_of(hidden_size=4096), r"hidden size 64, config\.json says 4096"),
    ],
)
def test_a_config_of_another_model_is_refused(config: ModelSpec, said: str, tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=f"{said}.*: give the one of the plan's model"):
        export(plan_of(model=model_of(hidden_size=64)), "sglang", tmp_path / "out", config=config)


@pytest.mark.parametrize("engine", ENGINES_OF_PLACEMENTS)
@pytest.mark.parametrize("cluster", ["1x4", "2x2"])
def test_the_start_command_is_a_line_that_a_shell_reads(engine: str, cluster: str, tmp_path: Path) -> None:
    folder = tmp_path / "it's \N{OX} here"
    command = export(plan_of(cluster=cluster), engine, folder).command
    printer = 'for word in "$@"; do printf \'%s\\0\' "$word"; done'
    script = f"say() {{ {printer}; }}; MODEL='a model'; NODE_RANK=1; HEAD=head; say {command}"
    words = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout.split("\0")
    assert "a model" in words
    assert any(str(folder) in word for word in words) or f"PYTHONPATH={folder}" in words
    assert ("head" in words or "head:25000" in words or "trtllm-llmapi-launch" in words) == (cluster == "2x2")
    for word in words:
        if word.startswith("{"):
            json.loads(word)


def test_nothing_is_left_where_something_was_or_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="not empty"):
        export(plan_of(), "sglang", tmp_path / "full")
    with pytest.raises(StorageError, match="cannot be written"):
        export(plan_of(), "sglang", tmp_path / "file" / "out")
    with pytest.raises(UsageError, match="colon"):
        export(plan_of(), "vllm", tmp_path / "a:b")
    for name in ("a\nb", "a\x1b[31mb", "a\udcff"):
        with pytest.raises(UsageError, match="a path that does not print cannot be pasted"):
            export(plan_of(), "sglang", tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "mine"]


@pytest.mark.parametrize(
    ("name", "kind", "rule"),
    [
        ("deepseek-ai/DeepSeek-V3", None, "lp"),
        ("ours", "deepseek_v3", "lp"),
        ("Qwen/Qwen3-30B-A3B", None, "static"),
        ("DeepSeek-V3", "qwen3_moe", "static"),
    ],
)
def test_sglang_splits_steps_exactly_for_plans_and_models_that_it_can(
    tmp_path: Path, name: str, kind: str | None, rule: str
) -> None:
    plan = plan_of(slots=3, model=replace(model_of(), name=name))
    assert "algorithm static " in export(plan, "sglang", tmp_path / "even", model_type=kind).command
    placement = known(plan.decisions.placement).model_copy(update={"replica_rule": ReplicaRule.LP})
    exact = plan_of(slots=3, model=plan.model, placement=placement)
    exported = export(exact, "sglang", tmp_path / "exact", model_type=kind)
    assert f"algorithm {rule} " in exported.command
    assert exported.replica_rule == json.loads((tmp_path / "exact" / SIDECAR).read_text())["replica_rule"] == rule
    assert any("lp draws" in one for one in exported.conditions) == (rule == "lp")
    if kind is None:
        assert strays(ENGINES["sglang"], exact) == ("" if rule == "lp" else "it does not split steps exactly")
    assert strays(ENGINES["vllm"], exact) == "it does not split steps exactly"
    assert not strays(ENGINES["vllm"], plan)


@pytest.mark.parametrize(
    ("own", "judged", "straying"),
    [
        (ReplicaRule.EVEN, None, {}),
        (
            ReplicaRule.NEAREST,
            None,
            dict.fromkeys(["vllm", "tensorrt-llm"], "its tokens do not use"),
        ),
        (ReplicaRule.NEAREST, "even", {}),
        (
            ReplicaRule.NEAREST,
            "static",
            {
                "vllm": "it chooses replicas by the rule even, not by static",
                "tensorrt-llm": "it chooses replicas by the rule round_robin, not by static",
            },
        ),
        (
            ReplicaRule.LP,
            "static",
            dict.fromkeys(["sglang", "vllm", "vllm-ascend", "tensorrt-llm"], "it does not split"),
        ),
    ],
)
def test_an_engine_strays_from_the_rule_by_which_a_plan_was_judged(
    own: ReplicaRule, judged: str | None, straying: dict[str, str]
) -> None:
    plain = plan_of(slots=3)
    placement = known(plain.decisions.placement).model_copy(update={"replica_rule": own})
    plan = plan_of(slots=3, placement=placement)
    plan = plan.model_copy(update={"options": {"evaluation": {"engine_rule": judged}}})
    words = {name: strays(engine, plan) for name, engine in ENGINES.items() if "placement" in engine.carries}
    assert {name for name, said in words.items() if said} == {*straying}
    assert all(words[name].startswith(said) for name, said in straying.items())


def test_shared_experts_go_where_there_is_room_under_sglang_alone(tmp_path: Path) -> None:
    plain = plan_of()
    filled = plain.model_copy(update={"options": {"evaluation": {"waterfill": True}}})
    for plan, flags in ((plain, 0), (filled, 1)):
        exported = export(plan, "sglang", tmp_path / str(flags))
        assert exported.command.split().count("--enable-waterfill") == flags
        assert sum("--enable-deepep-waterfill before 0.5.16" in one for one in exported.conditions) == flags
        straying = {name for name, engine in ENGINES.items() if strays(engine, plan)}
        assert straying == ({*ENGINES} - {"sglang"} if flags else set())
    assert strays(ENGINES["vllm"], filled) == "it computes shared experts at home, not where there is room"


def test_a_plan_judged_by_a_rule_that_is_none_is_refused() -> None:
    plan = plan_of(slots=3).model_copy(update={"options": {"evaluation": {"engine_rule": "best"}}})
    with pytest.raises(InputError, match="engine_rule 'best'; expected one of"):
        strays(ENGINES["sglang"], plan)


def test_the_rule_of_every_engine_can_be_replayed() -> None:
    rules = {name: engine.replica_rule for name, engine in ENGINES.items()}
    assert {rule for rule in rules.values() if rule is not None} <= set(get_args(ReplayRule))
    assert [name for name, rule in rules.items() if rule is None] == ["tutel"]
    groups = {point.group for point in importlib.metadata.distribution("moeplan").entry_points}
    assert groups == {"console_scripts"}  # moeplan itself is no plugin


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


@pytest.mark.parametrize(
    ("name", "engines"),
    [
        ("gpt-oss-20b", {"sglang", "vllm"}),
        ("openai/gpt-oss-120b", {"sglang", "vllm"}),
        ("gpt_oss", {"sglang", "vllm"}),
        ("Mixtral-8x7B-v0.1", {"sglang"}),
        ("Qwen3-30B-A3B", set()),
        ("my-mixtral-like", set()),
    ],
)
def test_an_engine_known_not_to_serve_a_model_under_a_plan_is_known_by_the_model_s_name(
    name: str, engines: set[str], tmp_path: Path
) -> None:
    model = replace(model_of(), name=name)
    assert {engine for engine in ENGINES_OF_PLACEMENTS if unserved(ENGINES[engine], model)} == engines
    for engine in engines:
        with pytest.raises(UsageError, match="cannot be given this plan"):
            export(plan_of(model=model), engine, tmp_path / engine)
    assert not any(unserved(ENGINES[engine], model, "qwen3_moe") for engine in ENGINES_OF_PLACEMENTS)
