"""Checkpoints of random tensors under the names that families have, plans for them, and the permutation by hand."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import moeplan
from moeplan.errors import MoeplanError
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.checkpoints import permute
from moeplan.runtime.plan import Plan, save
from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.traces.model import ModelSpec
from tests.builders import known
from tests.runtime.checkpoints import permute_run
from tests.runtime.plans import made_plan

INDEX = "model.safetensors.index.json"
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_size": 8,
    "moe_intermediate_size": 6,
    "num_attention_heads": 2,
}
STACKED = {"experts", "gate", "router", "input_linear", "output_linear", "e_score_correction_bias", "expert_bias"}
Tensors = dict[str, Tensor]


def expert_tensors(
    layers: Sequence[int], num_experts: int, *, block: str = "mlp", stem: str = "model.layers", seed: int = 0
) -> Tensors:
    """Layers of experts with tensors of their own, norms and a router each, between embeddings and a head."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {"model.embed_tokens.weight": drawn(16, 8), "lm_head.weight": drawn(16, 8)}
    for layer in layers:
        tensors[f"{stem}.{layer}.input_layernorm.weight"] = drawn(8)
        tensors[f"{stem}.{layer}.{block}.gate.weight"] = drawn(num_experts, 8)
        tensors[f"{stem}.{layer}.{block}.shared_expert.up_proj.weight"] = drawn(6, 8)
        for expert in range(num_experts):
            for part, shape in (("gate_proj", (6, 8)), ("up_proj", (6, 8)), ("down_proj", (8, 6))):
                tensors[f"{stem}.{layer}.{block}.experts.{expert}.{part}.weight"] = drawn(*shape)
    return tensors


def write_checkpoint(
    folder: Path, tensors: Tensors, config: Mapping[str, Any] | None = None, *, shards: int = 1
) -> Path:
    """The directory of a checkpoint in so many files, with a configuration and a tokenizer."""
    folder.mkdir(parents=True)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = names[shard::shards]
        save_file({name: tensors[name] for name in mine}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    if shards > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}, indent=2))
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config, indent=2) + "\n")
    (folder / "tokenizer.json").write_text('{"vocab": {"experts": 3, "model.layers.0.mlp.experts.1.x": 4}}')
    return folder


def read_tensors(folder: Path) -> Tensors:
    """All tensors of a checkpoint, each found where the index says."""
    if not (folder / INDEX).exists():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(weight_map.values())}
    assert sum(map(len, files.values())) == len(weight_map)
    return {name: files[file][name] for name, file in weight_map.items()}


def files_of(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a directory."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def plan_of(model: ModelSpec, rows: Sequence[Sequence[int]], num_devices: int = 2, **fields: Any) -> Plan:
    """A plan that puts the experts of each layer in this order, equally many a device."""
    rows_LE = np.array([_ascending(row, num_devices) for row in rows], dtype=np.int32)
    slots_D = np.full(num_devices, rows_LE.shape[1] // num_devices)
    placement = Placement(rows_LE, slots_D, model.num_experts, ReplicaRule.EVEN)
    return made_plan(Cluster(1, num_devices), model, placement, **fields)


def random_plan(model: ModelSpec, seed: int = 0) -> Plan:
    """A plan of random orders; of whole groups in random order, where the model chooses among groups first."""
    rng, groups = np.random.default_rng(seed), model.num_expert_groups if model.top_k_groups else None
    if groups is None:
        return plan_of(model, [rng.permutation(model.num_experts).tolist() for _ in model.layer_ids])
    blocks = np.arange(model.num_experts).reshape(groups, -1)
    return plan_of(model, [blocks[rng.permutation(groups)].ravel().tolist() for _ in model.layer_ids], groups)


def spec(num_experts: int = 4, layers: Sequence[int] = (0, 1), **fields: Any) -> ModelSpec:
    """A model with these layers of experts."""
    facts: dict[str, Any] = {"name": "tiny", "layer_ids": tuple(layers), "num_experts": num_experts, "top_k": 2}
    return ModelSpec(**facts | {"num_hidden_layers": 2} | fields)


@contextmanager
def permuting(plan: Plan, source: Path, *words: object) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that permutes, with what `permute_run` takes after plan and source."""
    save(plan, source.parent / "plan.json")
    paths = os.pathsep.join([str(Path(moeplan.__file__).parents[1]), str(Path(__file__).parents[3])])
    command = [sys.executable, permute_run.__file__, *map(str, (source.parent / "plan.json", source, *words))]
    pipe, env = subprocess.PIPE, os.environ | {"PYTHONPATH": paths}
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, env=env, text=True) as child:
        yield child


def permuted_by_hand(tensors: Tensors, plan: Plan) -> Tensors:
    """What the tensors of a checkpoint under a plan should be, by name."""
    rows = dict(zip(plan.model.layer_ids, known(plan.placement).physical_to_logical.tolist(), strict=True))
    expected: Tensors = {}
    for name, tensor in tensors.items():
        words = name.split(".")
        layer = int(words[words.index("layers") + 1]) if "layers" in words else -1
        if layer not in rows or "shared" in name or "mtp" in words:
            expected[name] = tensor
        elif "experts" in words and words[words.index("experts") + 1].isdecimal():
            place = words.index("experts") + 1
            words[place] = str(rows[layer].index(int(words[place])))
            expected[".".join(words)] = tensor
        elif "tid2eid" in words:
            expected[name] = torch.tensor([[rows[layer].index(e) for e in ids] for ids in tensor.tolist()]).to(tensor)
        elif STACKED & set(words):
            expected[name] = torch.stack([tensor[old] for old in rows[layer]])
        else:
            expected[name] = tensor
    return expected


def assert_same(actual: Tensors, expected: Tensors) -> None:
    """The same names, and of each the same type, shape and bytes."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(actual[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def assert_refused(
    kind: type[MoeplanError], message: str, source: Path, tmp_path: Path, plan: Plan | None = None
) -> None:
    """A plan, or one of ours, is refused in one line, and nothing is left behind."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(kind, match=message) as refused:
        permute(plan or PLAN, source, tmp_path / "permuted")
    assert "\n" not in str(refused.value)
    assert sorted(tmp_path.iterdir()) == before


def _ascending(row: Sequence[int], num_devices: int) -> list[int]:
    """The row with the experts of each device ascending, as plans have it."""
    return np.sort(np.reshape(row, (num_devices, -1)), axis=1).ravel().tolist()


ROWS = [[2, 0, 3, 1], [3, 1, 0, 2]]
PLAN = plan_of(spec(), ROWS)
