"""Which importer reads what: files, several files and directories, and what config.json says of the model."""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import numpy as np
import pytest

from moeplan.errors import InputError, MismatchError, UsageError
from moeplan.traces import importers
from moeplan.traces.importers import IMPORTERS, import_trace, selection
from tests.traces.importers.recordings import config, distinct_ids, megatron, per_pass, physical_map, tensorrt, write

H, E, K = 3, 6, 2
IDS = distinct_ids(np.random.default_rng(0), (2, 2, H, 5), E, K)
MAP = physical_map(np.random.default_rng(0), H, E, 2)
PASSES = per_pass(np.ones((3, 2, H, E + 2), np.int64), MAP)


def csv(rows: str = "0,1,5\n2,5,1\n") -> bytes:
    return b"layer,expert,count\n" + rows.encode()


def test_a_directory_or_its_files_are_one_recording(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", PASSES)
    one = import_trace(folder, tmp_path / "one")
    other = import_trace([folder / name for name in PASSES], tmp_path / "other")
    assert (one.importer, one.notes, one.model.name) == ("sglang", other.notes, "in")
    assert any("ranks 0-2 added up" in note for note in one.notes)


def test_what_else_lies_in_a_directory_is_left_out_and_said(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", {**tensorrt(np.ones((2, 2, H, E)), [0, 1, 2], K), "a.log": b"x", ".hidden": b"y"})
    (folder / "more").mkdir()
    summary = import_trace(folder, tmp_path / "trace")
    assert "1 other files left out: a.log" in summary.notes


def test_a_rank_whose_file_is_not_recognised_is_not_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", {**megatron(IDS, [0, 1, 2]), "router_trace_rank2.jsonl": b"\x00"})
    with pytest.raises(InputError, match=r"router_trace_rank2\.jsonl is damaged or of another kind than router_trace"):
        import_trace(folder, tmp_path / "trace")


def test_files_of_two_kinds_are_no_recording_where_both_were_named(tmp_path: Path) -> None:
    write(tmp_path, {"r.csv": csv(), **megatron(IDS, [0, 1, 2])})
    with pytest.raises(InputError, match=r"r\.csv is damaged or of another kind than router_trace_rank0\.jsonl"):
        import_trace([tmp_path / "router_trace_rank0.jsonl", tmp_path / "r.csv"], tmp_path / "trace")
    assert not (tmp_path / "trace").exists()


def test_kinds_of_one_file_are_not_taken_together(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", {"a.csv": csv(), "b.csv": csv()})
    with pytest.raises(InputError, match=r"2 recordings of one file each \(a\.csv, b\.csv, \.\.\.\); expected one"):
        import_trace(folder, tmp_path / "trace")


def test_directories_without_a_recording_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(InputError, match="0 files, expected 1 to"):
        import_trace(tmp_path / "in", tmp_path / "trace")
    write(tmp_path / "in", {"a.log": b"x", "b.log": b"y"})
    with pytest.raises(InputError, match="2 files of no kind that can be imported; known: megatron, "):
        import_trace(tmp_path / "in", tmp_path / "trace")
    monkeypatch.setattr(selection, "MAX_FILES", 1)
    with pytest.raises(InputError, match="2 files, expected 1 to 1"):
        import_trace(tmp_path / "in", tmp_path / "trace")
    with pytest.raises(UsageError, match="no recording"):
        import_trace([], tmp_path / "trace")


def test_the_config_says_which_hidden_layers_the_ordinals_are(tmp_path: Path) -> None:
    np.save(tmp_path / "r.npy", IDS[0, 0].transpose(1, 0, 2))
    write(tmp_path, {"config.json": config(5, 2, 8, K)})
    model = import_trace(tmp_path / "r.npy", tmp_path / "trace", hf_config=tmp_path / "config.json").model
    assert (model.layer_ids, model.num_experts, model.name) == ((2, 3, 4), 8, "deepseek_v3")
    assert (model.hidden_size, model.ffn_size, model.dtype_bytes, model.num_mtp_layers) == (64, 32, 2, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_k_dense_replace": 1}, "layers 0-2 recorded; config.json has experts in 1-4"),
        ({"num_experts_per_tok": 3}, "top_k 2 recorded; config.json says 3"),
    ],
)
def test_a_config_of_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    np.save(tmp_path / "r.npy", IDS[0, 0].transpose(1, 0, 2))
    write(tmp_path, {"config.json": config(5, 2, 8, K) | changes})
    with pytest.raises(MismatchError, match=message.replace(".", r"\.")):
        import_trace(tmp_path / "r.npy", tmp_path / "trace", hf_config=tmp_path / "config.json")
    assert not (tmp_path / "trace").exists()


def test_options_may_not_contradict_the_config(tmp_path: Path) -> None:
    np.save(tmp_path / "r.npy", IDS[0, 0].transpose(1, 0, 2))
    write(tmp_path, {"config.json": config(5, 2, 8, K)})
    with pytest.raises(UsageError, match="hidden_size 65 asked for; the file says 64"):
        import_trace(tmp_path / "r.npy", tmp_path / "trace", hf_config=tmp_path / "config.json", hidden_size=65)
    model = import_trace(tmp_path / "r.npy", tmp_path / "trace", hf_config=tmp_path / "config.json", name="mine").model
    assert model.name == "mine"


def test_a_config_that_is_none_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"r.csv": csv(), "config.json": {"model_type": "llama"}})
    with pytest.raises(InputError, match=r"config\.json: no number of experts"):
        import_trace(tmp_path / "r.csv", tmp_path / "trace", hf_config=tmp_path / "config.json")


def test_early_steps_are_left_out_of_tokens_and_need_steps(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", megatron(IDS, [0, 1, 2]))
    summary = import_trace(folder, tmp_path / "trace", first_step=1)
    assert summary.num_tokens == 2 * 5
    assert "10 rows of steps before 1 left out" in summary.notes
    np.save(tmp_path / "r.npy", IDS[0, 0])
    with pytest.raises(UsageError, match="first step 1 asked for; the recording does not tell steps"):
        import_trace(tmp_path / "r.npy", tmp_path / "other", first_step=1)
    assert not (tmp_path / "other").exists()


def test_every_module_that_opens_a_source_is_registered() -> None:
    names = [f".{module.name}" for module in iter_modules(importers.__path__)]
    openers = {name for name in names if hasattr(import_module(name, importers.__name__), "open_source")}
    assert set(IMPORTERS.values()) == openers
