"""A Hugging Face checkpoint in a local directory: its model and its tokenizer, from safetensors, no code of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InputError, UsageError
from ...files import sha256_file, sha256_json
from .config import check_layers, read_config

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
FREE_PARAMETERS = 2**20
MAX_PARAMETERS_A_BYTE = 4  # of weights: quantised to 4 bits there are 2
MAX_REASON = 200
OTHER_SHAPES = "ignore_mismatched_sizes"  # what transformers speaks of where the configuration has other sizes
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")
LOCAL = {"local_files_only": True, "trust_remote_code": False}


def load_model(directory: Path, *, dtype: str = "auto", device: str = "auto") -> "PreTrainedModel":
    """The causal language model in a directory, in eval mode.

    Parameters
    ----------
    dtype
        One of `DTYPES`; auto: that of the checkpoint.
    device
        A torch device; auto: CUDA where there is one, else the CPU.

    Raises
    ------
    UsageError
        transformers is missing, or the dtype or device unknown.
    InputError
        The directory holds no such model, or it is damaged: weights missing, of other shapes or not in safetensors.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r}; expected {', '.join(DTYPES)}")
    target = _device(device)
    _check_config(directory)
    with _quiet_transformers(), _refusing(directory, "a Hugging Face model"):
        from transformers import AutoModelForCausalLM

        _check_parameters(directory)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, use_safetensors=True, output_loading_info=True, **LOCAL
        )
        if missing := sorted(loaded[1]["missing_keys"]):
            raise InputError(f"its weights lack {missing[0]} and {len(missing) - 1} more; expected a whole checkpoint")
        model: PreTrainedModel = loaded[0].to(target).eval()
        return model


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer in a model's directory.

    Raises UsageError, InputError as for `load_model`.
    """
    with _quiet_transformers(), _refusing(directory, "a tokenizer"):
        from transformers import AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, **LOCAL)
        if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
            raise InputError("no tokenizer; expected tokenizer.json, or the files of another kind")
        return tokenizer


def tokenizer_label(directory: Path, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Label of a tokenizer in a trace: its class and a hash of its files."""
    files = {name: sha256_file(directory / name) for name in TOKENIZER_FILES if (directory / name).is_file()}
    return f"{type(tokenizer).__name__} sha256:{sha256_json(files)[:16]}"


def _device(name: str) -> "torch.device":
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in DEVICES:
            raise UsageError(f"device {name!r}; expected auto, cpu or cuda")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {name!r} is not there ({_line(error)}); expected auto, cpu or cuda") from error
    return device


def _check_config(directory: Path) -> None:
    """Refuse what is no configuration of a model, or one whose layers alone would fill the memory."""
    path = directory / "config.json"
    check_layers(path, read_config(path).get("num_hidden_layers", 1))


def _check_parameters(directory: Path) -> None:
    """Refuse a model far larger than its weights: the missing ones would be drawn at random and fill the memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    held = sum(path.stat().st_size for path in directory.glob("*.safetensors") if path.is_file())
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(directory, **LOCAL)
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    wanted = model.num_parameters()
    if wanted > FREE_PARAMETERS + MAX_PARAMETERS_A_BYTE * held:
        raise InputError(f"its config.json describes {wanted:,} parameters; its safetensors are of {held:,} bytes")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """transformers, kept off the network and from printing; refused in one line where it is missing or too old."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"recording a Hugging Face model needs transformers ({_line(error)}): pip install 'moeplan[transformers]'"
        ) from error
    logging: Any = transformers.utils.logging
    if int(transformers.__version__.split(".")[0]) < 5:
        raise UsageError(
            f"transformers {transformers.__version__} has experts that do not show their routing;"
            " expected 5 or newer: pip install -U 'transformers>=5'"
        )
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _refusing(directory: Path, what: str) -> Iterator[None]:
    """Whatever transformers finds wrong in a foreign directory, as one line."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{directory}: {error}") from error
    except Exception as error:
        differ = "its weights have other shapes than its config.json says"
        reason = differ if OTHER_SHAPES in str(error) else _line(error)
        raise InputError(f"{directory}: cannot be loaded as {what} ({reason})") from error


def _line(error: BaseException) -> str:
    """The first words of an error."""
    text: Any = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."
