"""Directories that are no model, or a damaged or hostile one: one line each, and nothing run or downloaded."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InputError, UsageError
from moeplan.traces.huggingface.checkpoint import load_model, load_tokenizer


@pytest.fixture
def copy(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("mixtral"), tmp_path / "model"))


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def rewrite(folder: Path, change: Callable[[bytes], bytes]) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(change(weights.read_bytes()))


def with_terabyte(content: bytes) -> bytes:
    """Weights whose first tensor is a terabyte by its header."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    next(entry for name, entry in header.items() if name != "__metadata__")["shape"] = [10**6, 10**6]
    forged = json.dumps(header).encode()
    return len(forged).to_bytes(8, "little") + forged + content[end:]


def with_code(folder: Path) -> None:
    edit(folder, model_type="own", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    (folder / "own.py").write_text("raise SystemExit('ran')")


Change = Callable[[Path], object]
SIZES: dict[str, dict[str, Any]] = {
    "an unknown architecture": {"model_type": "moonshot_9000", "architectures": ["Moonshot9000"]},
    "a million layers": {"num_hidden_layers": 10**6},
    "more layers than weights": {"num_hidden_layers": 5},
    "other shapes": {"hidden_size": 64},
    "absurd sizes": {"hidden_size": "wide"},
    "experts without end": {"num_local_experts": 10**9},
    "fewer experts than weights": {"num_local_experts": 5},
    "no experts": {"num_local_experts": 0},
    "experts below none": {"num_local_experts": -1},
    "experts in words": {"num_local_experts": "six"},
    "an endless vocabulary": {"vocab_size": 10**9},
}
CONFIGS = {"no JSON": "{", "of something else": '{"a": 1}', "sizes left out": '{"model_type": "mixtral"}'}
WEIGHTS: dict[str, Callable[[bytes], bytes]] = {
    "a header longer than the file": lambda data: (2**62).to_bytes(8, "little") + data[8:],
    "truncated weights": lambda data: data[:-1000],
    "weights that are none": lambda _: b"\xff" * 64,
    "a header that lies": with_terabyte,
}
DAMAGES: dict[str, Change] = {
    **{how: lambda folder, sizes=sizes: edit(folder, **sizes) for how, sizes in SIZES.items()},  # type: ignore[misc]
    **{how: lambda folder, text=text: (folder / "config.json").write_text(text) for how, text in CONFIGS.items()},  # type: ignore[misc]
    **{how: lambda folder, change=change: rewrite(folder, change) for how, change in WEIGHTS.items()},  # type: ignore[misc]
    "no config": lambda folder: (folder / "config.json").unlink(),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "pickled weights": lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
    "code of its own": with_code,
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_or_hostile_directory_is_refused_in_one_line(copy: Path, how: str) -> None:
    DAMAGES[how](copy)
    with pytest.raises(InputError) as refused:
        load_model(copy)
    assert str(copy) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 250 + 2 * len(str(copy))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("fewer experts than weights", r"its weights have other shapes than its config\.json says"),
        ("sizes left out", r"config\.json describes 46,[0-9,]+ parameters; its safetensors are of"),
        ("experts without end", r"config\.json describes [0-9,]+ parameters; its safetensors are of"),
    ],
)
def test_a_configuration_of_other_sizes_than_the_weights_is_named_as_such(copy: Path, how: str, words: str) -> None:
    DAMAGES[how](copy)
    with pytest.raises(InputError, match=words):
        load_model(copy)


def test_a_directory_without_a_tokenizer_is_refused(copy: Path) -> None:
    for path in copy.glob("*token*"):
        path.unlink()
    with pytest.raises(InputError, match="cannot be loaded as a tokenizer"):
        load_tokenizer(copy)


def test_a_tokenizer_without_words_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("olmoe"), tmp_path / "model"))
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(InputError, match=r"no tokenizer; expected tokenizer\.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int3"}, "dtype 'int3'"),
        ({"device": "abacus"}, "abacus"),
        ({"device": "meta"}, "expected auto, cpu or cuda"),
        ({"device": "privateuseone"}, "expected auto, cpu or cuda"),
    ],
)
def test_an_unknown_dtype_or_device_is_a_usage_error(copy: Path, options: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_model(copy, **options)


def test_the_dtype_of_the_weights_can_be_chosen(copy: Path) -> None:
    assert str(load_model(copy).dtype) == "torch.float32"
    assert str(load_model(copy, dtype="bfloat16").dtype) == "torch.bfloat16"


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
