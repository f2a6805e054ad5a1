"""The samples that a model is run on, as token ids: a text cut into equal pieces, or the prompts of a JSONL file.

Messages become the text that a tokenizer's chat template makes of them. A template is a foreign program: it may not
end, or fill the memory. So a process of its own runs it, bounded in both.
"""

import json
import multiprocessing
import os
import resource
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ...errors import InputError, UsageError
from ...files import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_BYTES = 256 * 2**20
MAX_LINE = 4 * 2**20  # characters
MAX_SECONDS = 10  # a conversation in a chat template
MAX_CHARACTERS = 4 * 2**20  # that it makes
MAX_MEMORY_BYTES = 2**30  # beyond what its process has when it starts
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
    with _ChatTemplate(tokenizer) as template:
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
    record: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", template: "_ChatTemplate", where: str
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
    """The first keys of a record, none long enough to fill a line."""
    return [key[:40] for key in sorted(record)[:5]]


def _chat(messages: Any, tokenizer: "PreTrainedTokenizerBase", template: "_ChatTemplate", where: str) -> str:
    if tokenizer.chat_template is None:
        raise UsageError(f"{where} has messages, and the tokenizer no chat template; give text or prompt instead")
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        raise InputError(f"{where}: messages is no list of objects; expected role and content in each")
    try:
        return template.text(messages)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


class _ChatTemplate:
    """The chat template of a tokenizer; a context manager, whose process starts with the first conversation."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._process: Any = None
        self._pipe: Any = None

    def text(self, messages: list[dict[str, Any]]) -> str:
        """Text that the template makes of a conversation, with the words that begin an answer.

        Raises InputError where the template refuses it, or does not end in `MAX_SECONDS` or within `MAX_MEMORY_BYTES`.
        """
        if self._process is None:
            self._start()
        try:
            self._pipe.send_bytes(json.dumps(messages).encode())
            answer = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            self._process.join()
            late = self._process.exitcode == -signal.SIGALRM
            reason = f"does not end within {MAX_SECONDS} s" if late else f"ends its process ({self._process.exitcode})"
            raise InputError(f"the chat template {reason}; give text or prompt instead") from error
        if "refused" in answer:
            raise InputError(f"the chat template refuses its messages ({answer['refused']})")
        text: str = answer["text"]
        return text

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()

    def _start(self) -> None:
        """Fork, so that the tokenizer need not travel; the template does not reach what other threads hold."""
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        arguments = (self._tokenizer, self._pipe, theirs)
        self._process = context.Process(target=_answer, args=arguments, daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()


def _answer(tokenizer: "PreTrainedTokenizerBase", ours: Connection, pipe: Connection) -> None:
    """Render conversations until the other side is gone."""
    ours.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, even within one long operation
    _bound_memory()
    while True:
        try:
            messages = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        signal.alarm(MAX_SECONDS)
        answer = json.dumps(_rendered(tokenizer, messages)).encode()
        signal.alarm(0)
        pipe.send_bytes(answer)


def _rendered(tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, Any]]) -> dict[str, str]:
    try:
        text: Any = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if len(text) > MAX_CHARACTERS:
            return {"refused": f"it makes {len(text):,} characters of them; expected at most {MAX_CHARACTERS:,}"}
    except MemoryError:
        return {"refused": "it fills the memory"}
    except Exception as error:  # noqa: BLE001  a foreign program may raise anything
        return {"refused": str(error)[:80] or type(error).__name__}
    return {"text": text}


def _bound_memory() -> None:
    """Bound the address space, where the system tells how much of it is taken."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most, hard = pages * resource.getpagesize() + MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
