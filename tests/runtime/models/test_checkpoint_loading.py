"""Weights by placement from checkpoints as transformers saves them, as the hub has them, and as state dicts."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moeplan.errors import InputError, UsageError
from moeplan.planner.demo.model import ModelConfig, MoELanguageModel
from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.checkpoints.directory import INDEX, SINGLE
from moeplan.runtime.models.checkpoint import fill_model, read_checkpoint
from tests.runtime.models.huggingface_models import FAMILIES, make_model, names_of_experts, on_meta
from tests.runtime.rank_cases import Case
from tests.runtime.worlds import by_rank, refusal_of

HELD: tuple[list[int], ...] = ([4, 0], [], [5, 2, 2])
CASE = Case("standard", (4, 4), (1, 1))
Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module", params=[*FAMILIES, "embedded"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A model and the directory of its checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "embedded":
        model: Any = MoELanguageModel(ModelConfig(num_layers=3, num_experts=6, hidden_size=32)).double()
        save_file(model.state_dict(), folder / SINGLE)
    else:
        pytest.importorskip("transformers")
        model = make_model(request.param)
        model.save_pretrained(folder)
    return model, folder


@pytest.fixture
def mixtral(tmp_path: Path) -> tuple[nn.Module, Path]:
    """A saved Mixtral, in a directory that a test may spoil."""
    pytest.importorskip("transformers")
    model: Any = make_model("mixtral")
    model.save_pretrained(tmp_path / "whole")
    return model, tmp_path / "whole"


def test_a_model_on_meta_gets_its_own_experts_and_reads_no_others(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = saved
    _assert_loads(on_meta(model), folder, model)
    if hasattr(model, "save_pretrained"):  # tensors by expert, or stacked
        model.save_pretrained(tmp_path / "stacked", save_original_format=False)
        _assert_loads(on_meta(model), tmp_path / "stacked", model)
    spoiled = {name: _spoiled(name, value, _held(model)) for name, value in load_file(folder / SINGLE).items()}
    assert any(tensor is None or not tensor.isfinite().all() for tensor in spoiled.values())
    save_file({name: value for name, value in spoiled.items() if value is not None}, tmp_path / "spoiled.safetensors")
    _assert_loads(on_meta(model), tmp_path / "spoiled.safetensors", model)


def test_shards_are_found_by_their_index_and_refused_without_a_tensor(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = saved
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    shards = {f"model-{shard}.safetensors": names[shard::3] for shard in range(3)}
    for file, held_names in shards.items():
        save_file({name: tensors[name] for name in held_names}, tmp_path / file)
    index = {"weight_map": {name: file for file, held_names in shards.items() for name in held_names}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    _assert_loads(on_meta(model), tmp_path, model)
    save_file({}, tmp_path / "model-0.safetensors")
    with pytest.raises(InputError, match=r"model-0\.safetensors: damaged "):
        load(on_meta(model), tmp_path, _held(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_built_on_meta_and_loaded_whole_has_the_logits_of_the_one_saved(family: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model: Any = make_model(family, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    loaded: Any = on_meta(model)
    load(loaded, tmp_path, {name: range(6) for name in names_of_experts(model)})
    tokens = torch.arange(1, 21).view(2, 10)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_weights_become_of_the_models_type_and_keep_whether_they_train(mixtral: tuple[Any, Path]) -> None:
    model, folder = mixtral
    loaded: Any = on_meta(model).to(torch.bfloat16)
    loaded.model.norm.weight.requires_grad_(False)
    load(loaded, folder, _held(model))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert [name for name, weight in loaded.named_parameters() if not weight.requires_grad] == ["model.norm.weight"]
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())


def test_weights_that_were_real_are_replaced_and_the_file_may_change_afterwards(mixtral: tuple[Any, Path]) -> None:
    model, folder = mixtral
    loaded, file = make_model("mixtral", seed=1), folder / SINGLE
    _assert_loads(loaded, file, model)
    with open(file, "r+b") as stream:
        stream.write(b"\xff" * file.stat().st_size)
    _assert_loaded(loaded, model, _held(model))


GATE = "model.layers.0.block_sparse_moe.experts.4.w1.weight"
NORM = "model.norm.weight"
WRONG: dict[str, tuple[Change, str]] = {
    "a tensor missing": (lambda tensors: tensors.pop(NORM), f"no {NORM} among"),
    "a part of an expert missing": (lambda tensors: tensors.pop(GATE), "gate_up_proj or that of expert 4 among"),
    "another shape": (lambda tensors: tensors.update({NORM: torch.ones(31)}), r"norm.weight is F32 \[31\]; .* \[32\]"),
    "an expert of another shape": (
        lambda tensors: tensors.update({GATE: torch.ones(32, 24)}),
        r"\[32, 24\]; .*\[24, 32\]",
    ),
    "quantised": (lambda tensors: tensors.update({NORM: torch.ones(32, dtype=torch.int8)}), r"is I8 \[32\]"),
    "not a number": (lambda tensors: tensors[GATE][0].fill_(torch.nan), "w1.weight holds numbers that are not finite"),
}


@pytest.mark.parametrize("problem", WRONG)
def test_a_checkpoint_of_another_model_is_refused_and_nothing_changed(problem: str, mixtral: tuple[Any, Path]) -> None:
    model, folder = mixtral
    change, message = WRONG[problem]
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / SINGLE).items()}
    change(tensors)
    save_file(tensors, folder / SINGLE)
    loaded = on_meta(model)
    with pytest.raises(InputError, match=message):
        load(loaded, folder, _held(model))
    assert all(parameter.is_meta for parameter in loaded.parameters())


FILES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[:-1],
    "empty": lambda content: content[:0],
    "a header of 2^62 bytes": lambda content: (2**62).to_bytes(8, "little") + content[8:],
    "no JSON": lambda content: content[:8] + b"!" + content[9:],
    "offsets beyond the file": lambda content: content.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1),
}


@pytest.mark.parametrize("problem", FILES)
def test_a_damaged_file_is_refused_in_one_line(problem: str, mixtral: tuple[Any, Path]) -> None:
    model, file = mixtral[0], mixtral[1] / SINGLE
    content = file.read_bytes()
    file.write_bytes(FILES[problem](content))
    assert file.read_bytes() != content
    with pytest.raises(InputError, match=r"model\.safetensors: damaged .*expected a safetensors checkpoint") as refusal:
        load(on_meta(model), file.parent, _held(model))
    assert "\n" not in str(refusal.value)


INDICES = {
    "[]": "no weight_map",
    '{"weight_map": {"lm_head.weight": "../whole/model.safetensors"}}': "a shard called '../whole/model.safetensors'",
    '{"weight_map": {"model.embed_tokens.weight": "gone.safetensors"}}': r"gone\.safetensors: cannot be read",
    "{": "not the index of a checkpoint",
}


@pytest.mark.parametrize("content", INDICES)
def test_a_wrong_index_is_refused_and_opens_no_file(content: str, mixtral: tuple[Any, Path], tmp_path: Path) -> None:
    model, _ = mixtral
    with pytest.raises(InputError, match="cannot be read as a safetensors checkpoint"):
        load(on_meta(model), tmp_path, _held(model))
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(InputError, match=INDICES[content]):
        load(on_meta(model), tmp_path, _held(model))


def spread_from_own_folder(world: World, folders: tuple[Path, Path]) -> tuple[str, bool]:
    """What a rank is told that spreads a whole model with the weights of its folder, and whether that changed it."""
    model = CASE.model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    refusal = refusal_of(lambda: parallelize(model, CASE.plan(), checkpoint=folders[world.rank]))
    after = model.state_dict()
    return refusal, list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)


def test_a_file_damaged_for_one_rank_is_refused_on_both_and_nothing_was_changed(tmp_path: Path) -> None:
    folders = tmp_path / "sound", tmp_path / "damaged"
    for folder in folders:
        folder.mkdir()
        save_file(replace(CASE, seed=1).model().state_dict(), folder / SINGLE)
    file = folders[1] / SINGLE
    file.write_bytes(file.read_bytes()[:-1])
    for refusal, unchanged in by_rank(2, spread_from_own_folder, folders):
        assert refusal.startswith(f"InputError: rank 1: {file}: damaged")
        assert unchanged


def test_a_buffer_on_meta_that_nobody_can_make_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    save_file(model.state_dict(), tmp_path / SINGLE)
    model[0].register_buffer("table", torch.empty(2, device="meta"), persistent=False)
    with pytest.raises(UsageError, match=r"buffer 0\.table is on the meta device"):
        load(model, tmp_path, {})


def load(model: nn.Module, path: Path, held: Mapping[str, Sequence[int]]) -> None:
    fill_model(model, read_checkpoint(model, path, held), "cpu")


def _held(model: nn.Module) -> dict[str, list[int]]:
    return dict(zip(names_of_experts(model), HELD, strict=False))  # Qwen3-MoE has a dense layer


def _spoiled(name: str, tensor: Tensor, held: dict[str, list[int]]) -> Tensor | None:
    """A tensor of a checkpoint, gone if it is of an expert that is not held, and not finite in the rows of those."""
    block, _, rest = name.partition(".experts.")
    if not rest:
        return tensor
    kept = held[block.replace("block_sparse_moe", "mlp") + ".experts"]
    expert = rest.split(".")[0]
    if expert.isdigit():
        return tensor if int(expert) in kept else None
    spoiled = torch.full_like(tensor, torch.nan)
    spoiled[kept] = tensor[kept]
    return spoiled


def _assert_loads(empty: nn.Module, path: Path, model: nn.Module) -> None:
    """A checkpoint gives this model what the whole one has."""
    load(empty, path, _held(model))
    _assert_loaded(empty, model, _held(model))


def _assert_loaded(loaded: nn.Module, model: nn.Module, held: dict[str, list[int]]) -> None:
    """Experts are the rows held, everything else the same, buffers that are in no checkpoint too."""
    expected = dict(model.named_parameters()) | dict(model.named_buffers())
    got = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        rows = held.get(name.rpartition(".")[0])
        assert torch.equal(got[name], tensor if rows is None else tensor[rows]), name
