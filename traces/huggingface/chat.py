"""Messages as the text that a tokenizer's chat template makes of them.

A template is a foreign program: it may not end, or fill the memory. So a process of its own runs it, bounded in both.
"""

import json
import multiprocessing
import resource
import signal
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ...errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChatTemplate"]

MAX_SECONDS = 10  # a conversation
MAX_CHARACTERS = 4 * 2**20
MAX_MEMORY_BYTES = 2**30  # beyond what the process has when it starts


class ChatTemplate:
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
