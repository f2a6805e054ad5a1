"""What permuting takes: a buffer, whatever the file, the tensor and the number of tensors."""

import json
import os
from pathlib import Path

import numpy as np

from moeplan.files import sha256_file
from moeplan.runtime.checkpoints.header import packed
from moeplan.runtime.plan import Plan
from tests.runtime.checkpoints.made_checkpoints import CONFIG, permuting, plan_of, spec

LIMIT_MIB = 256
ROW_BYTES = 80 * 2**20
ROW = [2, 0, 3, 1]


def test_a_tensor_larger_than_the_memory_allowed_is_permuted_and_undone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tensors = {
        "model.layers.0.mlp.experts.down_proj": ("BF16", [4, ROW_BYTES // 2]),
        "model.layers.0.mlp.gate.weight": ("F32", [4, 8]),
    }
    _write(source, tensors, CONFIG | {"num_hidden_layers": 1})
    start = (source / "model.safetensors").stat().st_size - 4 * ROW_BYTES - 128
    with open(source / "model.safetensors", "r+b") as stream:
        for expert in range(4):
            stream.seek(start + expert * ROW_BYTES)
            stream.write(bytes([expert + 1]) * 9)
    plan = plan_of(spec(4, (0,)), [ROW])
    assert _peak_mib(plan, source, tmp_path / "permuted", tmp_path / "restored") < LIMIT_MIB
    heads = []
    with open(tmp_path / "permuted" / "model.safetensors", "rb") as stream:
        for expert in range(4):
            stream.seek(start + expert * ROW_BYTES)
            heads.append(stream.read(9))
    assert plan.placement is not None
    assert heads == [bytes([old + 1]) * 9 for old in plan.placement.physical_to_logical[0]]
    assert sha256_file(tmp_path / "restored" / "model.safetensors") == sha256_file(source / "model.safetensors")


def test_thirty_thousand_tensors_in_a_file_take_less_than_half_of_it(tmp_path: Path) -> None:
    layers, num_experts = 20, 256
    tensors: dict[str, tuple[str, list[int]]] = {}
    for layer in range(layers):
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = ("F32", [num_experts, 1])
        for expert in range(num_experts):
            for part in ("gate_proj", "up_proj", "down_proj"):
                stem = f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
                tensors |= {stem: ("F8_E4M3", [1, 8]), f"{stem}_scale_inv": ("F32", [1, 1])}
    config = CONFIG | {"num_hidden_layers": layers, "num_experts": num_experts}
    _write(tmp_path / "source", tensors, config)
    rng = np.random.default_rng(0)
    plan = plan_of(spec(num_experts, range(layers)), [rng.permutation(num_experts).tolist() for _ in range(layers)])
    assert _peak_mib(plan, tmp_path / "source", tmp_path / "permuted") < LIMIT_MIB / 2


def test_a_long_text_among_the_metadata_takes_no_more_than_a_few_copies_of_it(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.experts.down_proj": ("BF16", [4, 8]),
        "model.layers.0.mlp.gate.weight": ("F32", [4, 8]),
    }
    _write(tmp_path / "source", tensors, CONFIG | {"num_hidden_layers": 1}, note='x"\\' * 2**21)
    plan = plan_of(spec(4, (0,)), [ROW])
    assert _peak_mib(plan, tmp_path / "source", tmp_path / "permuted") < LIMIT_MIB


def _write(folder: Path, tensors: dict[str, tuple[str, list[int]]], config: dict[str, object], note: str = "") -> None:
    """A checkpoint of one sparse file."""
    folder.mkdir()
    described: dict[str, dict[str, object]] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + int(np.prod(shape)) * {"F32": 4, "BF16": 2, "F8_E4M3": 1}[dtype]
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    described["__metadata__"] = {"note": note}
    head = packed(json.dumps(described, separators=(",", ":")))
    (folder / "model.safetensors").write_bytes(head)
    os.truncate(folder / "model.safetensors", len(head) + end)
    (folder / "config.json").write_text(json.dumps(config))


def _peak_mib(plan: Plan, source: Path, *targets: Path) -> float:
    with permuting(plan, source, *targets) as child:
        return float(child.communicate()[0])
