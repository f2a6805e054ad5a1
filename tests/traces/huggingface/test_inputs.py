"""Directories, configurations and texts to record a model with: what is read of them, and refused in one line each."""

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InputError, MoeplanError, UsageError
from moeplan.traces.huggingface import prompts as module
from moeplan.traces.huggingface.checkpoint import load_model, load_tokenizer, tokenizer_label
from moeplan.traces.huggingface.config import spec_of_config
from moeplan.traces.huggingface.prompts import Prompts, dataset_prompts, text_prompts
from moeplan.traces.recording.layers import moe_layers, spec_of
from tests.builders import known
from tests.traces.huggingface.families import FAMILIES


@pytest.fixture
def copy(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("mixtral"), tmp_path / "model"))


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def with_terabyte(content: bytes) -> bytes:
    """Weights whose first tensor is a terabyte by its header."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    next(entry for name, entry in header.items() if name != "__metadata__")["shape"] = [10**6, 10**6]
    forged = json.dumps(header).encode()
    return len(forged).to_bytes(8, "little") + forged + content[end:]


def sized(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: edit(folder, **changes)


def config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(text)


def weights(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def rewrite(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return rewrite


def with_code(folder: Path) -> None:
    edit(folder, model_type="own", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    (folder / "own.py").write_text("raise SystemExit('ran')")


PARAMETERS = r"config\.json describes [0-9,]+ parameters; its safetensors are of"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "an unknown architecture": (sized(model_type="moonshot_9000", architectures=["Moonshot9000"]), ""),
    "a million layers": (sized(num_hidden_layers=10**6), ""),
    "more layers than weights": (sized(num_hidden_layers=5), ""),
    "other shapes": (sized(hidden_size=64), ""),
    "absurd sizes": (sized(hidden_size="wide"), ""),
    "experts without end": (sized(num_local_experts=10**9), PARAMETERS),
    "fewer experts than weights": (sized(num_local_experts=5), r"its weights have other shapes than its config\.json"),
    "no experts": (sized(num_local_experts=0), ""),
    "an endless vocabulary": (sized(vocab_size=10**9), ""),
    "no JSON": (config("{"), ""),
    "of something else": (config('{"a": 1}'), ""),
    "sizes left out": (config('{"model_type": "mixtral"}'), PARAMETERS),
    "a header longer than the file": (weights(lambda data: (2**62).to_bytes(8, "little") + data[8:]), ""),
    "truncated weights": (weights(lambda data: data[:-1000]), ""),
    "a header that lies": (weights(with_terabyte), ""),
    "no config": (lambda folder: (folder / "config.json").unlink(), ""),
    "pickled weights": (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), ""),
    "code of its own": (with_code, ""),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_or_hostile_directory_is_refused_in_one_line(copy: Path, how: str) -> None:
    damage, words = DAMAGES[how]
    damage(copy)
    with pytest.raises(InputError, match=words or re.escape(str(copy))) as refused:
        load_model(copy)
    assert str(copy) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 250 + 2 * len(str(copy))


@pytest.mark.parametrize(
    ("family", "words"),
    [("mixtral", "cannot be loaded as a tokenizer"), ("olmoe", r"no tokenizer; expected tokenizer\.json")],
)
def test_a_directory_without_a_tokenizer_or_its_words_is_refused(
    checkpoint: Callable[..., Path], tmp_path: Path, family: str, words: str
) -> None:
    folder = Path(shutil.copytree(checkpoint(family), tmp_path / "model"))
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(InputError, match=words):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int3"}, "dtype 'int3'"),
        ({"device": "abacus"}, "abacus"),
        ({"device": "meta"}, "expected auto, cpu or cuda"),
    ],
)
def test_an_unknown_dtype_or_device_is_a_usage_error(copy: Path, options: dict[str, str], words: str) -> None:
    assert str(load_model(copy).dtype) == "torch.float32"
    assert str(load_model(copy, dtype="bfloat16").dtype) == "torch.bfloat16"
    with pytest.raises(UsageError, match=words):
        load_model(copy, **options)


def test_without_transformers_it_says_what_to_install(copy: Path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        f"sys.argv = ['moeplan', 'trace', 'record', {str(copy)!r}, '--text', '/etc/hostname', '-o', 'out']\n"
        "from moeplan.planner.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'moeplan[transformers]'" in done.stderr


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1, "hidden_size": 7168, "moe_intermediate_size": 2048, "torch_dtype": "bfloat16",
    "n_shared_experts": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128,
}  # fmt: skip
SMALL = {"model_type": "any", "num_hidden_layers": 6, "num_experts": 8, "num_experts_per_tok": 2}


def written(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_tells_what_the_loaded_model_tells(checkpoint: Callable[..., Path], family: str) -> None:
    folder = checkpoint(family)
    model = load_model(folder, device="cpu")
    loaded = spec_of(model, moe_layers(model), name="same")
    # How many experts are shared, some configurations leave to the modules.
    found = replace(spec_of_config(folder / "config.json"), name="same", num_shared_experts=loaded.num_shared_experts)
    assert found == loaded


def test_deepseek_v3_as_its_authors_wrote_it(tmp_path: Path) -> None:
    spec = spec_of_config(written(tmp_path, DEEPSEEK_V3))
    assert spec.layer_ids == tuple(range(3, 61))
    assert (spec.num_experts, spec.top_k) == (256, 8)
    assert (spec.num_expert_groups, spec.top_k_groups, spec.num_mtp_layers) == (8, 4, 1)
    assert (spec.dtype_bytes, spec.attention.kv_size, spec.ffn_size) == (2, 576, 2048)
    assert spec.attention.latent is None  # the file leaves sizes of heads out
    heads = {"qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 1536}
    whole = spec_of_config(written(tmp_path, DEEPSEEK_V3 | heads))
    assert known(whole.attention.latent).weights(128, 7168) == 187_105_280


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
        ({"interleave_moe_layer_step": 2}, (1, 3, 5)),
        ({"interleave_moe_layer_step": 2, "moe_layers": [0, 4]}, (0, 4)),
        ({"expert_layer_period": 3, "expert_layer_offset": 1}, (1, 4)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2}, (1, 3)),
        ({"moe_layer_start_index": 4, "moe_layer_end_index": -1}, (4, 5)),
        ({"num_dense_layers": 4}, (4, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"first_k_dense_replace": 0, "moe_layer_freq": [0, 0, 0, 1, 1, 1]}, (3, 4, 5)),
        ({"mlp_layer_types": ["dense", "sparse"] * 3, "first_k_dense_replace": 0}, (1, 3, 5)),
        ({"hybrid_override_pattern": "ME*-EM"}, (1, 4)),
        ({"layers_block_type": ["mamba", "attention"] * 3, "expert_layer_period": 2}, (0, 2, 4)),
    ],
)
def test_layers_with_experts_in_every_wording_also_of_the_text_part_of_a_model(
    tmp_path: Path, keys: dict[str, Any], layers: tuple[int, ...]
) -> None:
    assert spec_of_config(written(tmp_path, SMALL | keys)).layer_ids == layers
    inner = {key: value for key, value in (SMALL | keys).items() if key != "model_type"}
    outer = spec_of_config(written(tmp_path, {"model_type": "x", "torch_dtype": "float16", "text_config": inner}))
    assert (outer.layer_ids, outer.num_experts, outer.dtype_bytes) == (layers, 8, 2)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "config.json"),
        ([], "no model_type"),
        ({"model_type": "x"}, "number of experts"),
        (SMALL | {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        (SMALL | {"num_experts": 1, "num_experts_per_tok": 5}, "top-k"),
        (SMALL | {"decoder_sparse_step": "two"}, "which layers"),
        (SMALL | {"expert_layer_period": 0}, "layer"),
        (SMALL | {"mlp_layer_types": ["dense"] * 6}, "0 MoE layer ids"),
        (SMALL | {"first_k_dense_replace": None, "moe_layer_start_index": {}}, "which layers"),
    ],
)
def test_what_is_no_configuration_of_experts_is_refused_in_one_line(tmp_path: Path, config: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        spec_of_config(written(tmp_path, config))
    assert "\n" not in str(refused.value)


CHAT = "{% for m in messages %}{{ m['content'] }},{% endfor %}{% if add_generation_prompt %}z{% endif %}"


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Callable[..., Path]) -> Any:
    return load_tokenizer(checkpoint("mixtral"))


def lines(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return path


def test_a_text_is_cut_into_equal_samples_and_its_rest_left_out(tokenizer: Any) -> None:
    pieces = text_prompts("abcdefg", tokenizer, 3)
    assert tokenizer.batch_decode(pieces) == ["a b c", "d e f"]
    with pytest.raises(UsageError, match="7 tokens does not fill a sample of 8"):
        text_prompts("abcdefg", tokenizer, 8)


def test_an_empty_prompt_is_skipped_and_counted_even_where_every_text_begins_with_a_token(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = lines(tmp_path / "d", {"text": "ab"}, {"prompt": ""}, {"text": ""}, {"text": "c"})
    found = dataset_prompts(data, tokenizer)
    assert tokenizer.batch_decode(found.samples) == ["a b", "c"]
    assert found.num_empty == 2
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *_, add_special_tokens: {"input_ids": [add_special_tokens]})
    assert dataset_prompts(data, tokenizer) == Prompts([[1], [1]], 2)
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    talk = {"messages": [{"role": "user", "content": "ab"}]}
    assert dataset_prompts(lines(tmp_path / "d", talk), tokenizer) == Prompts([[0]], 0)  # the template has them


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        ("", InputError, "no line"),
        ("[" * 200_000, InputError, "line 1 is no JSON"),
        ("[1]", InputError, "line 1 is no JSON object"),
        ('{"text": "a"}\n{"body": "b"}', InputError, r"line 2 has keys \['body'\]"),
        ('{"text": 3}', InputError, "text is int"),
        ('{"text": ""}\n{"prompt": ""}', InputError, "2 lines, all empty"),
        ('{"text": "\\ud800"}', InputError, "line 1: its text holds half a surrogate pair"),
        ('{"text": "' + "a" * 2**22 + '"}', InputError, "line 1 has 4,194,316 characters"),
        ('{"' + "k" * 5000 + '": 1}', InputError, "line 1 has keys"),
        ('{"messages": [{"role": "user", "content": "a"}]}', UsageError, "no chat template"),
    ],
)
def test_a_line_that_is_no_sample_is_refused(
    tokenizer: Any, tmp_path: Path, content: str, kind: type[MoeplanError], words: str
) -> None:
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(kind, match=words) as refused:
        dataset_prompts(tmp_path / "d.jsonl", tokenizer)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("messages", [[], "ab", [3], [{"content": 4, "role": {}}]])
def test_messages_that_are_none_are_refused(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Any
) -> None:
    refusal = "{{ raise_exception('no') if messages[0]['content'] is number else '' }}"
    monkeypatch.setattr(tokenizer, "chat_template", refusal)
    with pytest.raises(InputError, match="line 1"):
        dataset_prompts(lines(tmp_path / "d", {"messages": messages}), tokenizer)


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (ENDLESS + "{% endfor %}", "does not end within 1 s"),
        ("{{ 'a' * 10 ** 11 }}", "it fills the memory"),
        ("{{ 'a' * 10 ** 7 }}", "10,000,000 characters"),
        ("{{ 1 // 0 }}", "refuses its messages"),
        ("{{ '\\ud800' }}", "its messages holds half a surrogate pair"),
        ("{% if %}", "refuses its messages"),
        ("", "its messages gives no token"),
    ],
)
def test_a_chat_template_that_fails_or_does_not_end_is_refused_with_its_line(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, words: str
) -> None:
    monkeypatch.setattr(module, "MAX_SECONDS", 1)
    monkeypatch.setattr(tokenizer, "chat_template", template)
    data = lines(tmp_path / "d", {"text": "a"}, {"messages": [{"role": "user", "content": "b"}]})
    with pytest.raises(InputError, match=f"line 2.*{words}"):
        dataset_prompts(data, tokenizer)
    assert not multiprocessing.active_children()


def test_texts_and_talks_stay_in_order(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    talks = [
        {"messages": [{"role": "user", "content": words} for words in talk]} for talk in (["ab"], ["cd", "c"], ["ef"])
    ]
    prompts = dataset_prompts(lines(tmp_path / "d", *talks[:2], {"text": "gh", "id": 4}, talks[2]), tokenizer)
    assert tokenizer.batch_decode(prompts.samples) == ["a b , z", "c d , c , z", "g h", "e f , z"]


def test_a_tokenizers_label_changes_with_its_files(tokenizer: Any, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("mixtral")
    label = tokenizer_label(folder, tokenizer)
    assert label.startswith(f"{type(tokenizer).__name__} sha256:")
    kept = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(kept + " ")
    assert tokenizer_label(folder, tokenizer) != label
    (folder / "tokenizer.json").write_text(kept)
