"""Recordings as engines write them, made of arrays that tests know.

A recording is {file name: content}, which `write` puts on disk: bytes as they are, a list as JSON lines, any other
value under a name that ends in .json as JSON, in .pt by torch.save, its tensors tagged as of a GPU, in .safetensors as
tensors.

Legend: H hidden layers; L MoE layers, the last of the hidden ones; E experts; P physical experts; R ranks; B steps;
T tokens; K experts per token.
"""

import base64
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import uuid4

import numpy as np
import pytest
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from safetensors.numpy import save_file

from moeplan.errors import InputError, MoeplanError, UsageError
from moeplan.traces.count_form import read_counts
from moeplan.traces.importers import ImportSummary, import_trace
from moeplan.traces.reader import open_trace
from tests.builders import known

Files = dict[str, Any]


def write(folder: Path, files: Files) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, list):
            lines = (line if isinstance(line, str) else json.dumps(line) for line in content)
            path.write_text("".join(f"{line}\n" for line in lines))
        elif path.suffix == ".json":
            path.write_text(json.dumps(content))
        elif path.suffix == ".safetensors":
            save_file(content, path)
        else:
            with mock.patch("torch.serialization.location_tag", return_value="cuda:0"):
                torch.save(content, path)
    return folder


def npy(array: Any) -> bytes:
    """An array as the bytes of an `.npy` file."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def npz(**arrays: Any) -> bytes:
    """Arrays as the bytes of an `.npz` file."""
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def config(num_hidden: int, num_dense: int, num_experts: int, top_k: int) -> dict[str, Any]:
    """A config.json as DeepSeek-V3's."""
    return {
        "model_type": "deepseek_v3",
        "num_hidden_layers": num_hidden,
        "first_k_dense_replace": num_dense,
        "n_routed_experts": num_experts,
        "num_experts_per_tok": top_k,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_nextn_predict_layers": 1,
        "n_shared_experts": 1,
        "torch_dtype": "bfloat16",
    }


def physical_map(rng: Generator, num_hidden: int, num_experts: int, redundant: int) -> NDArray[np.int64]:
    """The expert in each slot `[H, P]`, the redundant ones any."""
    more = rng.integers(num_experts, size=(num_hidden, redundant))
    once = np.tile(np.arange(num_experts), (num_hidden, 1))
    return rng.permuted(np.concatenate([once, more], axis=1), axis=1)


def stat(counts_BHE: NDArray[Any], *, rows: int, begin: int) -> Files:
    """A ring of so many rows, the first step at `begin`, unused rows zero."""
    ring = np.zeros((rows, *counts_BHE.shape[1:]), np.int32)
    ring[(begin + np.arange(len(counts_BHE))) % rows] = counts_BHE
    dump = {"rank": 0, "logical_count": torch.from_numpy(ring), "average_utilization_rate_over_window": None}
    return {"expert_distribution_recorder_1763.25.pt": dump}


def per_pass(counts_RBHP: NDArray[Any], map_HP: NDArray[np.int64]) -> Files:
    """Records of every rank with counts by physical expert."""
    return _records(
        [
            [{"global_physical_count": torch.from_numpy(counts_HP.astype(np.int32))} for counts_HP in counts_BHP]
            for counts_BHP in counts_RBHP
        ],
        map_HP,
    )


def per_token(ids_RBHTK: NDArray[Any], map_HP: NDArray[np.int64], *, mode: int = 1, width: int = 8) -> Files:
    """Records of every rank with physical experts, padded with -1 to the recorder's width."""
    num_tokens, padding = ids_RBHTK.shape[3], ((0, 0), (0, 0), (0, width - ids_RBHTK.shape[-1]))

    def record(step: int, ids_HTK: NDArray[Any]) -> dict[str, Any]:
        ids_HTC = torch.from_numpy(np.pad(ids_HTK, padding, constant_values=-1).astype(np.int32))
        facts = {"input_ids": [*range(num_tokens)], "extend_seq_lens": [num_tokens], "forward_mode": mode}
        return {**facts, "positions": [*range(step, step + num_tokens)], "topk_ids_of_layer": ids_HTC}

    return _records([[record(*numbered) for numbered in enumerate(ids_BHTK)] for ids_BHTK in ids_RBHTK], map_HP)


def _records(records_RB: list[list[dict[str, Any]]], map_HP: NDArray[np.int64]) -> Files:
    """The dumps of all ranks, whose first pass is 7."""
    return {
        f"expert_distribution_recorder_1763.25_{rank}.pt": {
            "records": [
                {"forward_pass_id": 7 + step, "rank": rank, "gatherer_key": "primary", **record}
                for step, record in enumerate(records_B)
            ],
            "last_physical_to_logical_map": torch.from_numpy(map_HP),
        }
        for rank, records_B in enumerate(records_RB)
    }


def sglang_response(ids_THK: NDArray[Any], *, prompt: int = 2, start: int = 0, **info: Any) -> dict[str, Any]:
    """What /generate answers, of a request that asked for the routing from `start` on."""
    packed = base64.b64encode(ids_THK[start:].astype("<i4").tobytes()).decode()
    counts = {"prompt_tokens": prompt, "completion_tokens": len(ids_THK) + 1 - prompt, "routed_experts": packed}
    return {"text": "so it goes", "output_ids": [1, 2], "meta_info": {"id": uuid4().hex, **counts, **info}}


def openai_response(ids_THK: NDArray[Any], *, prompt: int = 2) -> dict[str, Any]:
    """What SGLang's OpenAI endpoints answer."""
    info = sglang_response(ids_THK, prompt=prompt)["meta_info"]
    usage = {key: info[key] for key in ("prompt_tokens", "completion_tokens")}
    choices = [{"index": 0, "message": {"role": "assistant", "content": "so it goes"}}]
    return {"id": uuid4().hex, "choices": choices, "usage": usage, "sglext": {"routed_experts": info["routed_experts"]}}


def vllm_response(*choices_THK: NDArray[Any], prompt: int = 2) -> dict[str, Any]:
    """What vLLM answers, one choice or more."""
    routed = [base64.b64encode(npy(ids_THK)).decode() for ids_THK in choices_THK]
    completion = sum(len(ids_THK) + 1 - prompt for ids_THK in choices_THK)
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    choices = [{"index": index, "routed_experts": packed} for index, packed in enumerate(routed)]
    return {"id": uuid4().hex, "choices": choices, "usage": usage}


def tensorrt(counts_RBLE: NDArray[Any], layers: list[int], top_k: int, first: int = 100) -> Files:
    """The statistics of every rank and their description."""
    files: Files = {
        f"rank{rank}.safetensors": {
            f"{first + step}_{layer}": counts_BLE[step, place].astype(np.int64)
            for step in range(len(counts_BLE))
            for place, layer in enumerate(layers)
        }
        for rank, counts_BLE in enumerate(counts_RBLE)
    }
    return {"meta_info.json": {"num_experts": counts_RBLE.shape[-1], "num_experts_per_token": top_k}, **files}


def megatron(ids_RBLTK: NDArray[Any], layers: list[int], **more: Any) -> Files:
    """A file of every rank, a line a step and layer."""
    return {
        f"router_trace_rank{rank}.jsonl": [
            {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": rank}
            | {"num_tokens": ids_RBLTK.shape[3], "topk": ids_RBLTK.shape[4]}
            | {"top_indices": ids_BLTK[step, place].tolist(), **more}
            for step in range(ids_RBLTK.shape[1])
            for place, layer in enumerate(layers)
        ]
        for rank, ids_BLTK in enumerate(ids_RBLTK)
    }


def distinct_ids(rng: Generator, shape: tuple[int, ...], num_experts: int, top_k: int) -> NDArray[Any]:
    """Different experts in each cell, in any order `[..., K]`."""
    return np.argsort(rng.random((*shape, num_experts)), axis=-1)[..., :top_k]


def imported(folder: Path, files: Files, *, config: Any = None, to: str = "trace", **options: Any) -> ImportSummary:
    """Import a recording, a file or several, with a config.json beside it, into the trace `to`."""
    if config is not None:
        options["hf_config"] = write(folder, {"config.json": config}) / "config.json"
    return import_trace(on_disk(folder, files), folder / to, **options)


def refused(
    folder: Path, files: Files, *expected: str, kind: type[MoeplanError] = InputError, to: str = "trace", **options: Any
) -> None:
    """Importing a recording is refused in one line that holds all that is expected, and leaves nothing."""
    source = on_disk(folder, files)
    with pytest.raises(kind) as caught:
        imported(folder, files, to=to, **options)
    message = str(caught.value)
    assert all(part in message for part in expected), message
    assert message.startswith(f"{source}: ") or kind is UsageError
    assert "\n" not in message
    assert len(message) < 400 + len(str(source))
    assert {path.name for path in folder.iterdir()} <= {"in", "config.json", "trace"} - {to}


def on_disk(folder: Path, files: Files) -> Path:
    """The file of a recording of one file, the folder of others."""
    place = write(folder / "in", files)
    return place / next(iter(files)) if len(files) == 1 else place


def tokens_of(trace: Path, **options: Any) -> Any:
    """All tokens of a small trace, as a batch."""
    (batch,) = open_trace(trace).batches(**options)
    return batch


def cells_of(trace: Path) -> dict[tuple[int, ...], int]:
    """The counts of a trace by (known keys, layer id, expert), where it counts anything."""
    counts = read_counts(trace)
    known = [key for key in ("step", "sample", "source_rank") if key in counts.known]
    cells: Counter[tuple[int, ...]] = Counter()
    for table in counts.tables():
        for row, counts_E in enumerate(table.counts):
            keys = (*(int(getattr(table, key)[row]) for key in known), counts.meta.model.layer_ids[table.layer[row]])
            cells.update({(*keys, expert): int(count) for expert, count in enumerate(counts_E) if count})
    return dict(cells)


def counts_of(trace: Path) -> dict[int, NDArray[np.int64]]:
    """The counts `[L, E]` of each step of a trace, of all ranks together."""
    counts = read_counts(trace)
    model, counts_LE_of_step = counts.meta.model, dict[int, NDArray[np.int64]]()
    for table in counts.tables():
        for step, layer, row_E in zip(known(table.step).tolist(), table.layer, table.counts, strict=True):
            empty_LE = np.zeros((model.num_layers, model.num_experts), np.int64)
            counts_LE_of_step.setdefault(step, empty_LE)[layer] += row_E
    return counts_LE_of_step


def is_said(summary: ImportSummary, *parts: str) -> bool:
    """Whether a note of an import holds all these parts."""
    return any(all(part in note for part in parts) for note in summary.notes)
