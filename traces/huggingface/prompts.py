"""The samples that a model is run on, as token ids: a text cut into equal pieces, or the prompts of a JSONL file."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import InputError, UsageError
from ...files import read_text
from .chat import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Prompts", "dataset_prompts", "text_prompts"]

MAX_BYTES = 256 * 2**20
MAX_LINE = 4 * 2**20  # characters
KEYS = ("text", "prompt", "messages")


@dataclass(frozen=True, slots=True)
class Prompts:
    """The token ids of each sample, and how many lines were empty and left out."""

    samples: list[list[int]]
    num_empty: int = 0


def text_prompts(text: str, tokenizer: "PreTrainedTokenizerBase", sample_tokens: int) -> list[list[int]]:
    """The tokens of a text in pieces of `sample_tokens`, without special tokens; a rest at the end is left out.

    Raises UsageError where the text does not fill one piece.
    """
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not 1 <= sample_tokens <= len(tokens):
        raise UsageError(
            f"a text of {len(tokens)} tokens does not fill a sample of {sample_tokens}; give more text or another"
            " --sample-tokens"
        )
    last = len(tokens) // sample_tokens * sample_tokens
    return [tokens[start : start + sample_tokens] for start in range(0, last, sample_tokens)]


def dataset_prompts(path: str | os.PathLike[str], tokenizer: "PreTrainedTokenizerBase") -> Prompts:
    """The tokens of each line of a JSONL file: its `text` or `prompt`, or its `messages` by the chat template.

    A `text` or `prompt` that is empty is no sample; the samples are numbered without it.

    Raises
    ------
    InputError
        The file is no JSONL, a line holds none of them, the chat template fails on it, or every line is empty.
    UsageError
        It holds messages, and the tokenizer has no chat template.
    """
    with ChatTemplate(tokenizer) as template:
        lines = [_tokens(record, tokenizer, template, where) for record, where in _records(path)]
    samples = [tokens for tokens in lines if tokens]
    if not samples:
        reason = f"{len(lines)} lines, all empty" if lines else "no line"
        raise InputError(f"{path}: {reason}; expected a JSON object a line with {', '.join(KEYS[:2])} or {KEYS[2]}")
    return Prompts(samples, len(lines) - len(samples))


def _records(path: str | os.PathLike[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """The object of each line that is not blank, with its place for messages."""
    text = read_text(path, what="a data set in JSON lines", max_bytes=MAX_BYTES)
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        if len(line) > MAX_LINE:
            raise InputError(f"{path}: line {number} has {len(line):,} characters; expected at most {MAX_LINE:,}")
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: line {number} is no JSON ({str(error)[:80]})") from error
        if not isinstance(record, dict):
            raise InputError(f"{path}: line {number} is no JSON object; expected one with {' or '.join(KEYS)}")
        yield record, f"{path}: line {number}"


def _tokens(
    record: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", template: ChatTemplate, where: str
) -> list[int]:
    key = next((key for key in KEYS if key in record), None)
    if key is None:
        raise InputError(f"{where} has keys {_named(record)}; expected {' or '.join(KEYS)}")
    text = record[key] if key != "messages" else _chat(record[key], tokenizer, template, where)
    if not isinstance(text, str):
        raise InputError(f"{where}: {key} is {type(text).__name__}; expected a string")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise InputError(f"{where}: its {key} holds half a surrogate pair; expected Unicode text")
    if key != "messages" and not text:
        return []  # not even the token that begins every text
    tokens: list[int] = tokenizer(text, add_special_tokens=key != "messages")["input_ids"]
    if key == "messages" and not tokens:
        raise InputError(f"{where}: its {key} gives no token; expected one or more")
    return tokens


def _named(record: dict[str, Any]) -> list[str]:
    """Some keys, none long enough to fill a line."""
    return [key[:40] for key in sorted(record)[:5]]


def _chat(messages: Any, tokenizer: "PreTrainedTokenizerBase", template: ChatTemplate, where: str) -> str:
    if tokenizer.chat_template is None:
        raise UsageError(f"{where} has messages, and the tokenizer no chat template; give text or prompt instead")
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        raise InputError(f"{where}: messages is no list of objects; expected role and content in each")
    try:
        return template.text(messages)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
