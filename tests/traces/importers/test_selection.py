"""All importers: which reads what, what config.json says of the model, and a thousand mutated recordings."""

import resource
import shutil
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import numpy as np
import pytest

from moeplan.errors import InputError, MismatchError, MoeplanError, UsageError
from moeplan.traces import importers
from moeplan.traces.count_form import open_any
from moeplan.traces.importers import IMPORTERS, import_trace, selection
from tests.traces.importers.mutations import mutants
from tests.traces.importers.recordings import (
    Files,
    config,
    distinct_ids,
    imported,
    is_said,
    megatron,
    npy,
    npz,
    openai_response,
    per_pass,
    per_token,
    physical_map,
    refused,
    sglang_response,
    stat,
    tensorrt,
    vllm_response,
    write,
)

H, E, K = 3, 6, 2
IDS = distinct_ids(np.random.default_rng(0), (2, 3, H, 5), E, K)
MAP = physical_map(np.random.default_rng(0), H, E, 2)
COUNTS = np.random.default_rng(0).integers(1, 99, (2, 3, H, E))
PASSES = per_pass(np.ones((3, 2, H, E + 2), np.int64), MAP)


CSV = b"layer,expert,count\n0,1,5\n2,5,1\n"
NPY = {"r.npy": npy(IDS[0, 0].transpose(1, 0, 2))}


def test_a_directory_or_its_files_are_one_recording(tmp_path: Path) -> None:
    one = imported(tmp_path, PASSES, to="one")
    other = import_trace([tmp_path / "in" / name for name in PASSES], tmp_path / "other")
    assert (one.importer, one.notes, one.model.name) == ("sglang", other.notes, "in")
    assert is_said(one, "ranks 0-2 added up")


def test_what_else_lies_in_a_directory_is_left_out_and_said(tmp_path: Path) -> None:
    (tmp_path / "in" / "more").mkdir(parents=True)
    files = {**tensorrt(np.ones((2, 2, H, E)), [0, 1, 2], K), "a.log": b"x", ".hidden": b"y"}
    assert "1 other files left out: a.log" in imported(tmp_path, files).notes


def test_a_rank_whose_file_is_not_recognised_is_not_left_out(tmp_path: Path) -> None:
    files = {**megatron(IDS, [0, 1, 2]), "router_trace_rank2.jsonl": b"\x00"}
    refused(tmp_path, files, "router_trace_rank2.jsonl is damaged or of another kind than router_trace")


def test_files_of_two_kinds_are_no_recording_where_both_were_named(tmp_path: Path) -> None:
    write(tmp_path, {"r.csv": CSV, **megatron(IDS, [0, 1, 2])})
    with pytest.raises(InputError, match=r"r\.csv is damaged or of another kind than router_trace_rank0\.jsonl"):
        import_trace([tmp_path / "router_trace_rank0.jsonl", tmp_path / "r.csv"], tmp_path / "trace")
    assert not (tmp_path / "trace").exists()


def test_kinds_of_one_file_are_not_taken_together(tmp_path: Path) -> None:
    (dump,) = RING.values()
    for files in ({"a.csv": CSV, "b.csv": CSV}, {"a.pt": dump, "b.pt": dump}):
        a, b = files
        refused(tmp_path / a, files, f"2 recordings of one file each ({a}, {b}, ...); expected one")


def test_the_config_says_which_hidden_layers_the_ordinals_are(tmp_path: Path) -> None:
    model = imported(tmp_path, NPY, config=config(5, 2, 8, K)).model
    assert (model.layer_ids, model.num_experts, model.name) == ((2, 3, 4), 8, "deepseek_v3")
    assert (model.hidden_size, model.ffn_size, model.dtype_bytes, model.num_mtp_layers) == (64, 32, 2, 1)


ROUTED = np.concatenate(
    [np.zeros((4, 1, K), int), 1 + distinct_ids(np.random.default_rng(0), (4, 3), E - 1, K)], axis=1
)
RESPONSES = {"r.jsonl": [vllm_response(ROUTED)]}
RING = stat(np.ones((3, 4, E), int) * np.array([0, 1, 1, 1])[:, None], rows=5, begin=0)
SLOTS = 1 + distinct_ids(np.random.default_rng(0), (1, 1, 4, 5), E - 1, K)
SLOTS[:, :, 0] = -1
TOKENS = per_token(SLOTS, physical_map(np.random.default_rng(0), 4, E, 0))
SUMS = tensorrt(np.ones((2, 3, 3, E)), [1, 2, 3], K)


@pytest.mark.parametrize(
    ("files", "changes", "message"),
    [
        (NPY, {"num_hidden_layers": 5}, "layers 0-2 recorded; config.json has experts in 1-4"),
        (NPY, {"num_experts_per_tok": 3}, "top_k 2 recorded; config.json says 3"),
        (RESPONSES, {"num_hidden_layers": 5}, "4 layers recorded; config.json has 5 hidden layers"),
        (RESPONSES, {"first_k_dense_replace": 2}, "hidden layers 1 were routed; config.json has no experts there"),
        (RING, {"first_k_dense_replace": 2}, "hidden layers 1 were routed; config.json has no experts there"),
        (RING, {"n_routed_experts": 8}, "num_experts 6 recorded; config.json says 8"),
        (TOKENS, {"first_k_dense_replace": 2}, "hidden layers 1 were routed; config.json has no experts there"),
        (SUMS, {"first_k_dense_replace": 2}, "layers 1-3 recorded; config.json has experts in 2-3"),
        (SUMS, {"first_k_dense_replace": 0}, "layers 1-3 recorded; config.json has experts in 0-3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_of_another_model_is_refused(
    tmp_path: Path, files: Files, changes: dict[str, Any], message: str
) -> None:
    refused(tmp_path, files, message, kind=MismatchError, config=config(4, 1, E, K) | changes)


def test_options_may_not_contradict_the_config(tmp_path: Path) -> None:
    told, known = "hidden_size 65 asked for; the file says 64", config(5, 2, 8, K)
    refused(tmp_path, NPY, told, kind=UsageError, config=known, hidden_size=65)
    assert imported(tmp_path, NPY, config=known, name="mine").model.name == "mine"


def test_early_steps_are_left_out_of_tokens_and_need_steps(tmp_path: Path) -> None:
    summary = imported(tmp_path, megatron(IDS, [0, 1, 2]), first_step=1)
    assert summary.num_tokens == 2 * 2 * 5
    assert "10 rows of steps before 1 left out" in summary.notes
    told = "first step 1 asked for; the recording does not tell steps"
    refused(tmp_path / "other", NPY, told, kind=UsageError, first_step=1)


def test_every_module_that_opens_a_source_is_registered() -> None:
    names = [f".{module.name}" for module in iter_modules(importers.__path__)]
    openers = {name for name in names if hasattr(import_module(name, importers.__name__), "open_source")}
    assert set(IMPORTERS.values()) == openers


def test_directories_without_a_recording_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = {"a.log": b"x", "b.log": b"y"}
    refused(tmp_path, {}, "0 files, expected 1 to")
    refused(tmp_path, logs, "2 files of no kind that can be imported; known: megatron, ")
    monkeypatch.setattr(selection, "MAX_FILES", 1)
    refused(tmp_path, logs, "2 files, expected 1 to 1")
    with pytest.raises(UsageError, match="no recording"):
        import_trace([], tmp_path / "trace")


EACH = 92  # of eleven kinds
MOST_BYTES = 192 * 2**20


def json_tokens() -> list[dict[str, Any]]:
    cells = enumerate(IDS[0, 0].transpose(1, 0, 2).tolist())
    return [{"sample": 1, "position": place, "experts": experts, "step": 3} for place, experts in cells]


def lines() -> list[Any]:
    """Responses of every kind."""
    sequences = IDS.transpose(0, 1, 3, 2, 4).reshape(6, 5, H, K)
    raw = [sglang_response(sequences[0]), openai_response(sequences[1]), [sglang_response(sequences[2])]]
    return [*raw, vllm_response(sequences[3].astype(np.uint8)), vllm_response(sequences[4], sequences[5])]


KINDS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "stat": ("sglang", lambda: stat(COUNTS[0], rows=5, begin=3)),
    "per_pass": ("sglang", lambda: PASSES),
    "per_token": ("sglang", lambda: per_token(IDS, MAP)),
    "responses": ("responses", lambda: {"r.jsonl": lines()}),
    "tensorrt_llm": ("tensorrt_llm", lambda: tensorrt(COUNTS, [0, 1, 2], K)),
    "megatron": ("megatron", lambda: megatron(IDS, [0, 1, 2])),
    "npz": ("numpy", lambda: {"r.npz": npz(expert_ids=IDS[0, 0], pos=np.arange(H), seq_id=np.arange(H))}),
    "npz of counts": ("numpy", lambda: {"r.npz": npz(counts=np.full((3, H, E), K), n_tokens=np.full(3, E))}),
    "npy": ("numpy", lambda: {"r.npy": npy(IDS[0, 0, 0])}),
    "json_lines": ("json_lines", lambda: {"r.jsonl": [{"model": {"num_experts": E}}, *json_tokens()]}),
    "csv": ("csv", lambda: {"r.csv": b"layer,expert,count,step\n" + b"0,1,5,0\n1,2,7,1\n0,3,1,1\n" * 5}),
}


def test_all_importers_are_fuzzed() -> None:
    assert {importer for importer, _ in KINDS.values()} == IMPORTERS.keys()
    assert EACH * len(KINDS) >= 1000


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_recordings_are_imported_or_refused_in_one_line_and_leave_nothing(tmp_path: Path, kind: str) -> None:
    importer, make = KINDS[kind]
    files = {path.name: path.read_bytes() for path in write(tmp_path / "whole", make()).iterdir()}
    config_path = write(tmp_path, {"config.json": config(H, 0, E, K)}) / "config.json"
    configs = [config_path if kind == "responses" else None, config_path]
    assert import_trace(tmp_path / "whole", tmp_path / "trace", hf_config=configs[0]).importer == importer
    before, refusals = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for number, mutant in enumerate(mutants(files, seed=len(kind), count=EACH)):
        place = tmp_path / "place"
        folder = write(place / "in", mutant)
        source = folder if len(files) > 1 else folder / next(iter(files))
        began = time.process_time()
        try:
            import_trace(source, place / "out", hf_config=configs[number % 2])
            open_any(place / "out")
        except MoeplanError as error:
            refusals.append(str(error))
            left = [found.name for found in place.iterdir()]
            assert left == ["in"], refusals[-1]
        assert time.process_time() - began < 5, refusals[-1:]
        shutil.rmtree(place)
    assert not any("\n" in line or len(line) > 1000 for line in refusals)
    assert len(refusals) > EACH // 4  # the changes are no harmless ones
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES
