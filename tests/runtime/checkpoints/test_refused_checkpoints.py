"""Damaged and unknown checkpoints, plans that none can carry, permutations that undo nothing: one line each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import InputError, MismatchError, MoeplanError, UsageError
from moeplan.files import sha256_json
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.checkpoints import permute, undo
from moeplan.runtime.checkpoints.header import packed, read_header
from moeplan.solvers.placement import Placement
from tests.runtime.checkpoints.made_checkpoints import (
    CONFIG,
    INDEX,
    PLAN,
    ROWS,
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
from tests.runtime.plans import made_plan

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


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / FIRST).write_bytes(change((folder / FIRST).read_bytes()))


def _text(name: str, change: Callable[[str], str]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(change((folder / name).read_text()))


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
    "an index that is no JSON": (_text(INDEX, lambda text: text[:-9]), "not the index of a checkpoint"),
    "an index of nothing": (_text(INDEX, lambda _: '{"weight_map": {}}'), "names no tensor"),
    "an index of files elsewhere": (_text(INDEX, lambda text: text.replace(FIRST, f"../{FIRST}")), "a shard called"),
    "an index with absent tensors": (
        _text(INDEX, lambda text: text.replace('"lm_head.weight"', '"lm_head.bias"')),
        r"no lm_head.bias \(1 absent\), which model.safetensors.index.json puts there",
    ),
    "a shard cut short": (_bytes(lambda content: content[:-1]), "tensors of .* bytes in"),
    "a header cut short": (_bytes(lambda content: content[:40]), "40 bytes, .* of them header"),
    "a giant header": (
        _bytes(lambda content: (2**60).to_bytes(8, "little") + content[8:]),
        "1,152,921,504,606,846,976 of them header",
    ),
    "a header that is not UTF-8": (_bytes(lambda content: content[:9] + b"\xff" + content[10:]), "damaged .*utf-8"),
    "a header nested deeply": (_bytes(lambda _: packed("[" * 100_000)), "nested too deeply|damaged"),
    "a header with a name twice": (_bytes(lambda _: packed('{"a": {}, "a": {}}')), "a name twice"),
    "a header with another kind of object": (_bytes(lambda _: packed('{"a": 3}')), "something else than dtype"),
    "an unknown type": (_described(dtype="F7"), "a tensor of type 'F7'"),
    "a shape below zero": (_described(shape=[-1, -8]), "a tensor of shape"),
    "a shape that is too large": (_described(shape=[2**61, 8]), "in bytes"),
    "offsets that overlap": (
        _header(lambda header: _first(header).update(data_offsets=[4, 4 + _first(header)["data_offsets"][1]])),
        "begins at byte 4, where 0 was expected",
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
    "no router": (_without(GATE), "no router of hidden layer 1"),
    "an expert missing": (_without(UP), "hidden layer 0 lacks up_proj of expert 2"),
    "an expert too many": (
        lambda tensors: tensors.update({UP.replace("experts.2", "experts.4"): tensors[UP].clone()}),
        "hidden layer 0 has up_proj of expert 4; expected experts 0 to 3",
    ),
    "a layer without experts": (_without("layers.1."), r"no experts of hidden layer 1 .*\(1 of 2 layers"),
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


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", expert_tensors((0, 1), 4))


def test_plans_that_no_checkpoint_can_carry_are_refused_with_what_helps(source: Path, tmp_path: Path) -> None:
    replicas = Placement.from_sets([[[0, 1, 2], [1, 2, 3]]] * 2, 4)
    unequal = Placement.from_sets([[[0, 1, 2], [3]]] * 2, 4)
    for placement, words in (
        (replicas, "6 slots per layer for 4 experts.*without --redundant"),
        (unequal, "gives devices 1 to 3 slots.*without --slots"),
        (None, "decides no placement"),
    ):
        assert_refused(UsageError, words, source, tmp_path, made_plan(Cluster(1, 2), spec(), placement))


def test_plans_of_another_model_are_refused(source: Path, tmp_path: Path) -> None:
    other = plan_of(spec(6), [[0, 2, 4, 1, 3, 5]] * 2)
    assert_refused(MismatchError, "the plan is of 6 experts per layer, the checkpoint has 4", source, tmp_path, other)
    fewer = plan_of(spec(4, (0,)), ROWS[:1])
    assert_refused(MismatchError, "experts in hidden layer 1, of which the plan knows", source, tmp_path, fewer)
    more = plan_of(spec(4, (0, 1, 2)), [*ROWS, ROWS[0]])
    assert_refused(InputError, "no experts of hidden layer 2", source, tmp_path, more)


def test_groups_known_to_the_plan_alone_are_kept_too(source: Path, tmp_path: Path) -> None:
    model = spec(num_expert_groups=2, top_k_groups=1)
    assert_refused(UsageError, "--groups whole", source, tmp_path, plan_of(model, ROWS))
    permute(plan_of(model, [[2, 3, 0, 1]] * 2), source, tmp_path / "permuted")


RECORDS = {
    "{": "not the permutation of a checkpoint",
    "[]": "not the permutation of a checkpoint",
    '{"schema_version": 2}': "schema version 2",
    '{"0": [0, 0, 1, 2], "1": [3, 1, 0, 2]}': "layer 0 is no permutation of 4 experts",
    '{"0": [0, 1], "1": [3, 1, 0, 2]}': "expected one number",
    "{}": "0 layers of",
    '{"0": [0, 1, 2, 3], "7": [3, 1, 0, 2]}': "no experts of hidden layer 7",
    '{"0": [0, 1, 2], "1": [2, 1, 0]}': "where 3 experts were expected first|expected experts 0 to 2",
    '{"-1": [0, 1], "1": [1, 0]}': "no experts of hidden layer -1|expected",
}


@pytest.mark.parametrize("content", RECORDS)
def test_a_permutation_damaged_or_of_another_model_undoes_nothing(content: str, source: Path, tmp_path: Path) -> None:
    permute(PLAN, source, tmp_path / "permuted")
    record = tmp_path / "permuted" / "moeplan-permutation.json"
    text = content
    if content[-1] == "}" and "schema" not in content:
        permutation = json.loads(content)
        changed = {"permutation": permutation, "permutation_sha256": sha256_json(permutation)}
        text = json.dumps(json.loads(record.read_text()) | changed)
    record.write_text(text)
    with pytest.raises(InputError, match=RECORDS[content]):
        undo(tmp_path / "permuted", tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


def test_a_permutation_is_not_done_twice_nor_one_changed_or_never_made_undone(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no moeplan-permutation\.json; expected a checkpoint"):
        undo(source, tmp_path / "restored")
    permute(PLAN, source, tmp_path / "made")
    with pytest.raises(UsageError, match="permuted already; undo that first: moeplan apply --undo"):
        permute(PLAN, tmp_path / "made", tmp_path / "again")
    record = tmp_path / "made" / "moeplan-permutation.json"
    content = json.loads(record.read_text())
    for permutation in ({"0": [1, 0, 2, 3], "1": [0, 1, 2, 3]}, {"0": content["permutation"]["0"]}):
        record.write_text(json.dumps(content | {"permutation": permutation}))
        with pytest.raises(InputError, match="the permutation was changed, its hash is another"):
            undo(tmp_path / "made", tmp_path / "restored")
    record.write_text(" " * (4 * 2**20 + 1))
    with pytest.raises(InputError, match=r"4,194,305 bytes, expected the permutation of a checkpoint of at most"):
        undo(tmp_path / "made", tmp_path / "restored")
