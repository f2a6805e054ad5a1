"""Damaged, hostile and unknown checkpoints: one line each, and nothing written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import InputError, MoeplanError
from moeplan.runtime.checkpoints import permute
from moeplan.runtime.checkpoints.header import packed, read_header
from tests.runtime.checkpoints.made_checkpoints import (
    CONFIG,
    INDEX,
    Tensors,
    assert_refused,
    assert_same,
    expert_tensors,
    permuted_by_hand,
    plan_of,
    read_tensors,
    spec,
    write_checkpoint,
)

GATE = "model.layers.1.mlp.gate.weight"
UP = "model.layers.0.mlp.experts.2.up_proj.weight"
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def _header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """What writes the first file's header anew, changed."""

    def spoil(folder: Path) -> None:
        content = (folder / FIRST).read_bytes()
        header = read_header(folder / FIRST)
        described = json.loads(header.text)
        change(described)
        (folder / FIRST).write_bytes(packed(json.dumps(described)) + content[header.data_start :])

    return spoil


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / FIRST).write_bytes(change((folder / FIRST).read_bytes()))

    return spoil


def _text(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).write_text(change((folder / name).read_text()))

    return spoil


def _first(described: dict[str, Any]) -> dict[str, Any]:
    tensors = {name: tensor for name, tensor in described.items() if name != "__metadata__"}
    first: dict[str, Any] = min(tensors.values(), key=lambda tensor: tensor["data_offsets"][0])
    return first


def _described(**changes: Any) -> Callable[[Path], None]:
    return _header(lambda header: _first(header).update(changes))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (lambda folder: folder.rename(folder.with_name("gone")), "no directory; expected a Hugging Face"),
    "a shard is missing": (lambda folder: (folder / SECOND).unlink(), "cannot be read as a safetensors file"),
    "a shard is a directory": (
        lambda folder: [step(folder / SECOND) for step in (Path.unlink, Path.mkdir)],
        "a directory, expected a regular file",
    ),
    "no weights": (
        lambda folder: [file.rename(folder / f".{file.name}") for file in folder.glob("model*")],
        r"no weights, but no model.safetensors nor model.safetensors.index.json",
    ),
    "only pickled weights": (
        lambda folder: [file.rename(folder / "pytorch_model.bin") for file in folder.glob("model*")],
        "pytorch_model.bin, but no model.safetensors .*only safetensors are read",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: cannot be read"),
    "a config of another kind": (_text("config.json", lambda _: "[]"), "no model_type"),
    "an index that is no JSON": (_text(INDEX, lambda text: text[:-9]), "not the index of a checkpoint"),
    "an index of nothing": (_text(INDEX, lambda _: '{"weight_map": {}}'), "names no tensor"),
    "an index of files elsewhere": (_text(INDEX, lambda text: text.replace(FIRST, f"../{FIRST}")), "a shard called"),
    "an index with absent tensors": (
        _text(INDEX, lambda text: text.replace('"lm_head.weight"', '"lm_head.bias"')),
        r"no lm_head.bias \(1 absent\), which model.safetensors.index.json puts there",
    ),
    "an index with tensors in the wrong file": (
        _text(INDEX, lambda text: text.replace(FIRST, "x").replace(SECOND, FIRST).replace('"x"', f'"{SECOND}"')),
        "absent",
    ),
    "a shard cut short": (_bytes(lambda content: content[:-1]), "tensors of .* bytes in"),
    "a shard with more bytes": (_bytes(lambda content: content + b"0"), "tensors of .* bytes in"),
    "an empty shard": (_bytes(lambda _: b""), "0 bytes"),
    "a header cut short": (_bytes(lambda content: content[:40]), "40 bytes, .* of them header"),
    "a giant header": (
        _bytes(lambda content: (2**60).to_bytes(8, "little") + content[8:]),
        "1,152,921,504,606,846,976 of them header",
    ),
    "a header that is not UTF-8": (_bytes(lambda content: content[:9] + b"\xff" + content[10:]), "damaged .*utf-8"),
    "a header that is no object": (_bytes(lambda _: packed("[1]")), "a header that is no object"),
    "a header nested deeply": (_bytes(lambda _: packed("[" * 100_000)), "nested too deeply|damaged"),
    "a header with a name twice": (_bytes(lambda _: packed('{"a": {}, "a": {}}')), "a name twice"),
    "a header with another kind of object": (_bytes(lambda _: packed('{"a": 3}')), "something else than dtype"),
    "an unknown type": (_described(dtype="F7"), "a tensor of type 'F7'"),
    "a shape with a fraction": (_described(shape=[1.5]), r"a tensor of shape \[1.5\]"),
    "a shape below zero": (_described(shape=[-1, -8]), "a tensor of shape"),
    "a shape that is too large": (_described(shape=[2**61, 8]), "in bytes"),
    "offsets that overlap": (
        _header(lambda header: _first(header).update(data_offsets=[4, 4 + _first(header)["data_offsets"][1]])),
        "begins at byte 4, where 0 was expected",
    ),
    "offsets out of range": (
        _header(lambda header: _first(header).update(data_offsets=[2**40, 2**40 + _first(header)["data_offsets"][1]])),
        "begins at byte",
    ),
    "offsets backwards": (_header(lambda header: _first(header)["data_offsets"].reverse()), "a tensor of|in bytes"),
    "a header of more values than tensors have": (
        _bytes(lambda _: packed('{"a": [' + "[]," * 300_000 + "1]}")),
        r"300,001 times '\[', at most 200,000 are read",
    ),
    "an index of more values than tensors have": (
        _text(INDEX, lambda _: '{"weight_map": [' + "1," * 300_001 + "1]}"),
        "300,001 times ',', at most 300,000 are read",
    ),
    "a file whose name is no text": (
        lambda folder: (folder / "caf\udce9.txt").write_text("x"),
        r"a file called 'caf\\udce9.txt'; expected a printable name",
    ),
    "one offset": (_described(data_offsets=[0]), "a tensor of shape"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_one_line_and_nothing_written(damage: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", expert_tensors((0, 1), 4), shards=2)
    spoil, message = DAMAGES[damage]
    spoil(source)
    assert_refused(InputError, message, source, tmp_path)


def _with(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def _without(word: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if word in name]


UNKNOWN: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "a fused tensor of another kind": (
        _with("model.layers.0.mlp.experts.mlp.w1", 24, 8),
        "model.layers.0.mlp.experts.mlp.w1 is no part of a layer of experts that is known here",
    ),
    "a router of all layers": (
        _with("model.router_bias", 2, 4),
        "model.router_bias mentions experts or a router outside of the layers",
    ),
    "experts beside their block": (
        _with("model.layers.0.expert_gate.weight", 4, 8),
        "model.layers.0.expert_gate.weight mentions experts or a router beside the block",
    ),
    "experts in two blocks": (
        _with("model.layers.0.moe.experts.down_proj", 4, 8),
        "hidden layer 0 has experts in mlp and moe",
    ),
    "a fused tensor of other experts": (
        _with("model.layers.0.mlp.experts.down_proj", 5, 4),
        r"has shape \[5, 4\], where 4 experts were expected first",
    ),
    "a router of other experts": (_with(GATE, 5, 8), r"gate.weight has shape \[5, 8\], where 4"),
    "a router transposed": (_with(GATE, 8, 4), r"has shape \[8, 4\]"),
    "no router": (_without(GATE), "no router of hidden layer 1"),
    "an expert missing": (_without(UP), "hidden layer 0 lacks up_proj of expert 2"),
    "an expert too many": (
        lambda tensors: tensors.update({UP.replace("experts.2", "experts.4"): tensors[UP].clone()}),
        "hidden layer 0 has up_proj of expert 4; expected experts 0 to 3",
    ),
    "a layer without experts": (_without("layers.1."), r"no experts of hidden layer 1 .*\(1 of 2 layers"),
    "no layer of experts": (_without("layers"), r"no experts of hidden layer 0 .*\(2 of 2 layers"),
    "two models": (
        lambda tensors: tensors.update(expert_tensors((0, 1), 4, stem="draft.layers")),
        "layers of experts under draft.layers and model.layers; expected one model",
    ),
    "numbers of experts as fractions": (
        _with("model.layers.0.mlp.gate.tid2eid", 3, 2),
        "tid2eid numbers experts by F32, where I64 or",
    ),
    "numbers of experts that are none": (
        lambda tensors: tensors.update({"model.layers.0.mlp.gate.tid2eid": torch.tensor([[0, 4]])}),
        "names expert 4; expected 0 to 3",
    ),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_experts_in_a_form_that_is_not_known_are_refused_by_name_and_nothing_written(kind: str, tmp_path: Path) -> None:
    tensors = expert_tensors((0, 1), 4)
    change, message = UNKNOWN[kind]
    change(tensors)
    assert_refused(InputError, message, write_checkpoint(tmp_path / "source", tensors), tmp_path)


@given(data=st.data())
@settings(max_examples=60)
def test_bytes_changed_anywhere_in_a_header_are_read_right_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    source = write_checkpoint(folder / "source", expert_tensors((0,), 2), CONFIG | {"num_experts": 2})
    content = bytearray((source / "model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, read_header(source / "model.safetensors").data_start - 1))] = data.draw(
            st.integers(0, 255)
        )
    (source / "model.safetensors").write_bytes(content)
    plan = plan_of(spec(2, (0,)), [[1, 0]])
    try:
        permute(plan, source, folder / "permuted")
    except MoeplanError:
        assert [file.name for file in folder.iterdir()] == ["source"]
    else:
        assert_same(read_tensors(folder / "permuted"), permuted_by_hand(read_tensors(source), plan))
