"""The lines of recorded responses: what an engine says of one request, and its routing packed in base64.

==================  ============================================  ====================================================
SGLang, native      `meta_info.routed_experts`                    int32, little-endian, without a shape
SGLang, OpenAI      `sglext.routed_experts`                       the same, of the first choice
vLLM                `choices[i].routed_experts`                   an `.npy` file, `[tokens, hidden layers, top-k]`
==================  ============================================  ====================================================

Legend: T tokens; H hidden layers; K experts per token.
"""

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError, UsageError
from ..model import ModelSpec
from .npy import parse_array
from .source import numbered_lines

MAX_LINE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Response:
    """Response to one request, as far as the importer needs it."""

    number: int
    packed: str  #: Its routing, base64
    is_raw: bool  #: Whether what that packs has no shape (SGLang)
    #: prompt_tokens, total_tokens: none where the response does not tell them of this request alone
    prompt_tokens: int | None
    total_tokens: int | None
    source_rank: int | None  #: The data-parallel rank that ran it; None where unknown


def responses_of(path: Path, seen: set[int]) -> Iterator[Response]:
    """The responses of a file in order: an object a line, or a list of them.

    `seen` has hashes of the ids of responses so far, of this and other files; it grows. InputError where a line is no
    response with its routing, or one for the second time; it is named.
    """
    for number, text in numbered_lines(path, MAX_LINE_BYTES, "a response a line"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:120]
            raise InputError(f"line {number}: no JSON ({reason}); expected a response a line") from error
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict):
                raise InputError(f"line {number}: {str(item)[:40]}; expected a response, an object")
            yield from _responses(number, item, seen)


def routing_of(response: Response, model: ModelSpec | None) -> NDArray[Any]:
    """Expert ids of a response, `[T, H, K]`; InputError where they are damaged or of another shape.

    Raises UsageError where nothing tells their shape, and there is no model to tell it.
    """
    where = f"line {response.number}: routed_experts"
    try:
        data = base64.b64decode(response.packed, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{where} is no base64 ({error})") from error
    if response.is_raw:
        return _shaped(where, data, model)
    ids_THK = parse_array(where, data)
    if ids_THK.ndim != 3 or ids_THK.dtype.kind not in "iu" or min(ids_THK.shape[1:]) < 1:
        raise InputError(f"{where} is {ids_THK.dtype} {ids_THK.shape}; expected integers [tokens, layers, top-k]")
    return ids_THK


def _shaped(where: str, data: bytes, model: ModelSpec | None) -> NDArray[np.int32]:
    if model is None or model.num_hidden_layers is None:
        raise UsageError(
            "SGLang's routed_experts do not tell how many layers and experts per token they are of; give --hf-config"
            " config.json of the model"
        )
    row = model.num_hidden_layers * model.top_k
    if len(data) % (4 * row):
        raise InputError(
            f"{where} is {len(data):,} bytes; expected rows of {4 * row:,}: int32 of {model.num_hidden_layers} hidden"
            f" layers and {model.top_k} experts by config.json"
        )
    return np.frombuffer(data, "<i4").reshape(-1, model.num_hidden_layers, model.top_k)


def _responses(number: int, item: Mapping[str, Any], seen: set[int]) -> Iterator[Response]:
    """The responses in one object: of vLLM one of every choice."""
    info, choices, extension = _part(item, "meta_info"), item.get("choices"), _part(item, "sglext")
    _check_new(number, info.get("id", item.get("id")), seen)
    if not isinstance(choices, list):
        yield _response(number, info, info, is_raw=True)
        return
    usage = _part(item, "usage") if len(choices) == 1 else {}
    for holder in [extension] if extension else choices:
        yield _response(number, holder if isinstance(holder, dict) else {}, usage, is_raw=bool(extension))


def _check_new(number: int, name: Any, seen: set[int]) -> None:
    """Refuse an id that was there: each chunk of a stream repeats what came before it."""
    if isinstance(name, str):
        if hash(name) in seen:
            raise InputError(
                f"line {number}: id {name[:40]!r} for the second time: a stream's chunks, or a response twice, would be"
                " counted double; keep the last line of each"
            )
        seen.add(hash(name))


def _part(item: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under a key, empty where there is none."""
    part = item.get(key)
    return part if isinstance(part, dict) else {}


def _response(number: int, holder: Mapping[str, Any], usage: Mapping[str, Any], *, is_raw: bool) -> Response:
    packed = holder.get("routed_experts")
    if packed is not None and not isinstance(packed, str):
        raise InputError(f"line {number}: routed_experts {str(packed)[:40]}; expected base64, as the engine sends them")
    if packed is None:
        raise InputError(
            f"line {number}: no routed_experts; expected them of every response: start the engine with"
            " --enable-return-routed-experts, and ask SGLang for them in each request"
        )
    prompt, completion, rank = (_count(number, usage, key) for key in ("prompt_tokens", "completion_tokens", "dp_rank"))
    total = None if prompt is None or completion is None else prompt + completion
    return Response(number, packed, is_raw, prompt, total, rank)


def _count(number: int, usage: Mapping[str, Any], key: str) -> int | None:
    value = usage.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < 2**30):
        raise InputError(f"line {number}: {key} {str(value)[:40]}; expected a number from 0 to 1,073,741,823")
    return value
