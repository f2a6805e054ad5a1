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


def edit_header(weights: Path) -> None:
    """Make the first tensor a terabyte."""
    content = weights.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    next(entry for name, entry in header.items() if name != "__metadata__")["shape"] = [10**6, 10**6]
    forged = json.dumps(header).encode()
    weights.write_bytes(len(forged).to_bytes(8, "little") + forged + content[end:])


def damage(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    match how:
        case "no config":
            (folder / "config.json").unlink()
        case "a config that is no JSON":
            (folder / "config.json").write_text("{")
        case "a config of something else":
            (folder / "config.json").write_text('{"a": 1}')
        case "an unknown architecture":
            edit(folder, model_type="moonshot_9000", architectures=["Moonshot9000"])
        case "a million layers":
            edit(folder, num_hidden_layers=10**6)
        case "other shapes":
            edit(folder, hidden_size=64)
        case "experts without end":
            edit(folder, num_local_experts=10**9)
        case "fewer experts than weights":
            edit(folder, num_local_experts=5)
        case "no experts":
            edit(folder, num_local_experts=0)
        case "experts below none":
            edit(folder, num_local_experts=-1)
        case "experts in words":
            edit(folder, num_local_experts="six")
        case "sizes left out":
            (folder / "config.json").write_text('{"model_type": "mixtral"}')
        case "an endless vocabulary":
            edit(folder, vocab_size=10**9)
        case "a header that lies":
            edit_header(weights)
        case "a header longer than the file":
            weights.write_bytes((2**62).to_bytes(8, "little") + weights.read_bytes()[8:])
        case "absurd sizes":
            edit(folder, hidden_size="wide")
        case "no weights":
            weights.unlink()
        case "truncated weights":
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "weights that are none":
            weights.write_bytes(b"\xff" * 64)
        case "pickled weights":
            weights.rename(folder / "pytorch_model.bin")
        case "more layers than weights":
            edit(folder, num_hidden_layers=5)
        case "code of its own":
            edit(folder, model_type="own", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
            (folder / "own.py").write_text("raise SystemExit('ran')")


@pytest.mark.parametrize(
    "how",
    [
        "no config",
        "a config that is no JSON",
        "a config of something else",
        "an unknown architecture",
        "a million layers",
        "other shapes",
        "experts without end",
        "fewer experts than weights",
        "no experts",
        "experts below none",
        "experts in words",
        "sizes left out",
        "an endless vocabulary",
        "a header that lies",
        "a header longer than the file",
        "absurd sizes",
        "no weights",
        "truncated weights",
        "weights that are none",
        "pickled weights",
        "more layers than weights",
        "code of its own",
    ],
)
def test_a_damaged_or_hostile_directory_is_refused_in_one_line(copy: Path, how: str) -> None:
    damage(copy, how)
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
    damage(copy, how)
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
