"""`moeplan trace import` of engines' recordings, as typed: what is read and said, and who refuses what is missing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.traces.importers.recordings import config, distinct_ids, megatron, physical_map, stat, vllm_response, write
from tests.traces.importers.recordings import per_pass as passes

H, E, K = 4, 8, 2


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recordings of one model by several engines, and its config.json."""
    folder, rng = tmp_path_factory.mktemp("home"), np.random.default_rng(0)
    counts = rng.integers(1, 99, (6, H, E))
    counts[:, 0] = 0
    ids = distinct_ids(rng, (20, 9, H), E, K)
    ids[:, :, 0] = 0
    map_HP = physical_map(rng, H, E, 0)
    by_slot = np.take_along_axis(np.stack([counts, 2 * counts]), map_HP[None, None], -1)
    write(folder, {"config.json": config(H, 1, E, K), **stat(counts, rows=9, begin=5)})
    write(folder, {"answers.jsonl": [vllm_response(ids_THK) for ids_THK in ids]})
    write(folder / "passes", passes(by_slot, map_HP))
    write(folder / "router", megatron(ids[:2].transpose(0, 2, 1, 3)[:, None, 1:], [1, 2, 3]))
    return folder


def test_a_directory_of_ranks_is_imported_and_what_it_cannot_tell_is_said(
    moeplan: Any, home: Path, tmp_path: Path
) -> None:
    done = moeplan("trace", "import", home / "passes", "--hf-config", home / "config.json", cwd=tmp_path)
    assert "imported  counts" in done.stdout
    assert "3 layers x 8 experts, top-2" in done.stdout
    assert "model     deepseek_v3\n" in done.stdout
    assert "note      ranks 0-1 added up: tokens, requests and source ranks are unknown" in done.stdout
    found = json.loads(moeplan("trace", "info", "traces", "--json", cwd=tmp_path).stdout)
    assert (found["form"], found["num_steps"], found["model"]["layer_ids"]) == ("counts", 6, [1, 2, 3])


def test_files_as_a_shell_spells_them_out_are_one_recording(moeplan: Any, home: Path, tmp_path: Path) -> None:
    files = sorted((home / "passes").iterdir())
    done = moeplan("trace", "import", *files, "-o", "t", "--first-step", "9", "--json", cwd=tmp_path)
    assert "6 rows of steps before 9 left out" in json.loads(done.stdout)["notes"]


def test_a_strategy_that_needs_tokens_refuses_counts_in_one_line(moeplan: Any, home: Path, tmp_path: Path) -> None:
    moeplan("trace", "import", home / "expert_distribution_recorder_1763.25.pt", cwd=tmp_path)
    done = moeplan("solve", "--strategy", "exflow", "--cluster", "1x4", cwd=tmp_path, code=3)
    assert "exflow needs tokens" in done.stderr
    assert done.stderr.strip().count("\n") == 0
    assert not (tmp_path / "plan.json").exists()


def test_a_strategy_that_needs_samples_refuses_tokens_without_requests(
    moeplan: Any, home: Path, tmp_path: Path
) -> None:
    moeplan("trace", "import", home / "router", cwd=tmp_path)
    done = moeplan("solve", "--strategy", "netmoe", "--cluster", "1x4", cwd=tmp_path, code=2)
    assert "samples were not recorded" in done.stderr
    assert done.stderr.strip().count("\n") == 0


def test_responses_go_all_the_way_to_a_plan(moeplan: Any, home: Path, tmp_path: Path) -> None:
    done = moeplan("trace", "import", home / "answers.jsonl", cwd=tmp_path, code=3)
    assert "give --hf-config config.json" in done.stderr
    assert not (tmp_path / "traces").exists()
    done = moeplan("trace", "import", home / "answers.jsonl", "--hf-config", home / "config.json", cwd=tmp_path)
    assert "imported  180 tokens of 20 samples, 3 layers x 8 experts, top-2" in done.stdout
    moeplan("solve", "--strategy", "exflow", "--cluster", "1x4", "--time-limit", "1", cwd=tmp_path)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["model"]["layer_ids"] == [1, 2, 3]


def test_a_config_of_another_model_ends_with_the_code_of_a_mismatch(moeplan: Any, home: Path, tmp_path: Path) -> None:
    write(tmp_path, {"config.json": config(5, 1, E, K)})
    source = home / "expert_distribution_recorder_1763.25.pt"
    done = moeplan("trace", "import", source, "--hf-config", "config.json", cwd=tmp_path, code=4)
    assert "4 layers recorded; config.json has 5 hidden layers" in done.stderr
