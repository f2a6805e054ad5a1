"""`moeplan trace import`, `info` and `count` of both forms of a trace and of engines' recordings, as typed."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.planner.demo.text import record_embedded, record_text
from tests.traces.importers.recordings import config, distinct_ids, megatron, physical_map, stat, vllm_response, write
from tests.traces.importers.recordings import per_pass as passes

H, E, K = 4, 8, 2
STAT = "expert_distribution_recorder_1763.25.pt"


@pytest.fixture(scope="module")
def home(moeplan: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trace from JSON lines in `traces`, its counts in `counts`, those of `r.csv` in `sparse`."""
    folder = tmp_path_factory.mktemp("home")
    rng = np.random.default_rng(0)
    with (folder / "r.jsonl").open("w") as stream:
        stream.write('{"model": {"num_experts": 8, "name": "mine"}}\n')
        for token in range(600):
            ids = [rng.permutation(4)[:2] + 4 * (token // 300) for _ in range(3)]
            line = {"sample": token // 20, "position": token % 20, "experts": np.array(ids).tolist()}
            stream.write(json.dumps(line) + "\n")
    (folder / "r.csv").write_text("layer,expert,count,step\n3,0,5,0\n3,1,7,0\n5,1,2,1\n3,0,1,0\n")
    moeplan("trace", "import", "r.jsonl", cwd=folder)
    moeplan("trace", "count", (folder / "traces").as_uri(), "-o", "counts", cwd=folder)
    moeplan("trace", "import", "r.csv", "-o", "sparse", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def info(moeplan: Any, home: Path) -> Any:
    """`info(trace)`: its JSON, and its screen, which fits 80 columns."""

    def told(trace: str, cwd: Path = home) -> tuple[dict[str, Any], str]:
        text = moeplan("trace", "info", trace, cwd=cwd).stdout
        assert max(map(len, text.splitlines())) <= 80
        return json.loads(moeplan("trace", "info", trace, "--json", cwd=cwd).stdout), text

    return told


def test_info_tells_what_a_trace_holds_and_what_counts_do_not(info: Any) -> None:
    (tokens, text), (counts, less) = info("traces"), info("counts")
    assert (tokens["form"], tokens["num_tokens"], tokens["num_samples"]) == ("tokens", 600, 30)
    assert tokens["model"]["name"] == "mine"
    assert min(tokens["locality"]) > 0.4  # each half of the samples has half of the experts
    assert tokens["affinity_information"]["bits"][0] > 0.9 > 0.2 > tokens["affinity_information"]["shuffled"][0]
    assert "locality" in text
    assert counts["form"] == "counts"
    assert (counts["skew"], counts["locality"]) == (tokens["skew"], tokens["locality"])
    assert counts.keys() == tokens.keys()
    assert [counts[name] for name in ("num_tokens", "affinity", "affinity_information", "phase_tokens")] == [None] * 4
    assert "not there" in less


def test_info_names_the_hidden_layers_where_they_are_not_the_ordinals(info: Any) -> None:
    lines = info("sparse")[1].splitlines()
    (head,) = (row for row, line in enumerate(lines) if line.startswith("layer hidden  load"))
    assert [line.split()[:2] for line in lines[head + 1 : head + 3]] == [["0", "3"], ["1", "5"]]
    assert "hidden" not in info("traces")[1]


def test_info_draws_a_page(moeplan: Any, home: Path, tmp_path: Path) -> None:
    for trace, drawn in (("traces", True), ("counts", False)):
        path = tmp_path / "missing" / ".." / f"{trace}.html"
        assert f"wrote     {path}" in moeplan("trace", "info", trace, "--plot", path, cwd=home, COLUMNS="999").stdout
        assert ("Co-activation" in path.resolve().read_text()) is drawn


def test_counts_of_csv_are_added_up_by_count(moeplan: Any, refuse: Any, info: Any, home: Path, tmp_path: Path) -> None:
    done = moeplan("trace", "import", home / "r.csv", "-o", "csv", "--top-k", "2", cwd=tmp_path)
    assert re.search(r"imported  counts( of \d+ tokens)?, 2 layers x 2 experts, top-2", done.stdout)
    assert "model     r, after the file; --name says another" in done.stdout
    assert "\nsteps     in their order; source ranks not recorded\n" in done.stdout
    named = moeplan("trace", "import", home / "r.csv", "-o", "named", "--name", "r", cwd=tmp_path).stdout
    assert "model     r\n" in named
    done = moeplan("trace", "count", "csv", "-o", (tmp_path / "again").as_uri(), "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["by"] == ["step"]
    facts, _ = info("again", tmp_path)
    assert (facts["num_rows"], facts["num_steps"], facts["model"]["layer_ids"]) == (2, 2, [3, 5])
    refuse("trace", "count", "csv", "-o", "third", "--phase", "decode", cwd=tmp_path, code=2, words="--phase")


@pytest.mark.parametrize("args", [("import", "r.csv"), ("count", "traces")])
def test_a_place_that_is_not_local_is_refused_as_output(refuse: Any, home: Path, args: Any) -> None:
    refuse("trace", *args, "-o", "s3://bucket/traces", cwd=home, code=2, words="written to local ones only")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recordings of one model by several engines, and its config.json."""
    folder, rng = tmp_path_factory.mktemp("recorded"), np.random.default_rng(0)
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


def test_a_directory_of_ranks_is_imported_or_files_as_a_shell_spells_them_out(
    moeplan: Any, info: Any, recorded: Path, tmp_path: Path
) -> None:
    said = moeplan("trace", "import", recorded / "passes", "--hf-config", recorded / "config.json", cwd=tmp_path).stdout
    assert "3 layers x 8 experts, top-2" in said
    assert "model     deepseek_v3\n" in said
    assert "note      ranks 0-1 added up: tokens, requests and source ranks are unknown" in said
    assert "\nsteps     in their order; source ranks not recorded\n" in said
    facts, _ = info("traces", tmp_path)
    assert (facts["form"], facts["num_steps"], facts["model"]["layer_ids"]) == ("counts", 6, [1, 2, 3])
    files = sorted((recorded / "passes").iterdir())
    done = moeplan("trace", "import", *files, "-o", "t", "--first-step", "9", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert "6 rows of steps before 9 left out" in told["notes"]
    assert (told["step_order"], told["source_ranks"]) == ("known", False)
    router = moeplan("trace", "import", recorded / "router", "-o", "router", cwd=tmp_path).stdout
    assert "\nsteps     in their order; source ranks recorded\n" in router
    write(tmp_path / "full", stat(np.ones((6, H, E), np.int64), rows=6, begin=5))  # a ring that begins anywhere
    full = moeplan("trace", "import", tmp_path / "full", "-o", "ring", cwd=tmp_path).stdout
    assert "\nsteps     in no known order; source ranks not recorded\n" in full


def test_responses_go_all_the_way_to_a_plan_by_the_config_of_their_model(
    moeplan: Any, refuse: Any, recorded: Path, tmp_path: Path
) -> None:
    write(tmp_path, {"config.json": config(5, 1, E, K)})
    args = ("trace", "import", recorded / STAT, "--hf-config", "config.json")
    refuse(*args, cwd=tmp_path, code=4, words="4 layers recorded; config.json has 5 hidden layers")
    answers = ("trace", "import", recorded / "answers.jsonl")
    refuse(*answers, cwd=tmp_path, code=3, words="give --hf-config config.json")
    done = moeplan(*answers, "--hf-config", recorded / "config.json", cwd=tmp_path)
    assert "imported  180 tokens of 20 samples, 3 layers x 8 experts, top-2" in done.stdout
    assert "\nsteps     not recorded; source ranks not recorded\n" in done.stdout
    moeplan("solve", "--strategy", "exflow", "--cluster", "1x4", "--time-limit", "1", cwd=tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["model"]["layer_ids"] == [1, 2, 3]


def test_the_shipped_example_is_written_once_and_can_be_planned_with(moeplan: Any, refuse: Any, tmp_path: Path) -> None:
    done = moeplan("trace", "example", "gpt-oss-20b", cwd=tmp_path)
    assert "seconds and GB are of bf16; its checkpoint holds experts as MXFP4" in " ".join(done.stdout.split())
    told = json.loads(moeplan("trace", "info", "--json", cwd=tmp_path).stdout)
    assert f"{told['num_tokens']:,} tokens of gpt-oss-20b" in done.stdout
    assert (told["num_samples"], told["phase_tokens"]) == (140, {"decode": told["num_tokens"]})
    told = moeplan("trace", "example", "gpt-oss-20b", "-o", "again", "--json", cwd=tmp_path).stdout
    assert json.loads(told) == {"trace": "again", "num_tokens": 43_916, "model": "gpt-oss-20b"}
    refuse("trace", "example", "gpt-oss-20b", cwd=tmp_path, code=2, words="traces: already there and not empty")
    command = done.stdout.partition("next: moeplan ")[2].split()
    profiled = moeplan(*command, cwd=tmp_path).stdout
    again = moeplan(*command, cwd=tmp_path).stdout
    assert "replaced" not in profiled
    assert "replaced profile.json (tables and described, of 2x8)" in again
    command = again.partition("next: moeplan ")[2].split()
    assert "plan.json" in moeplan(*command, "--time-limit", "2", cwd=tmp_path).stdout


def test_the_names_of_examples_are_told_in_one_line(moeplan: Any, refuse: Any, tmp_path: Path) -> None:
    assert moeplan("trace", "example", "list", cwd=tmp_path).stdout == "gpt-oss-20b\n"
    assert json.loads(moeplan("trace", "example", "list", "--json", cwd=tmp_path).stdout) == {
        "examples": ["gpt-oss-20b"]
    }
    refuse("trace", "example", "gpt-oss", cwd=tmp_path, code=2, words="example 'gpt-oss'; expected gpt-oss-20b")


def test_info_names_a_recording_that_looks_like_one_of_random_tokens(info: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    letters = "".join(map(chr, rng.integers(32, 127, 20_000)))
    record_embedded(letters, tmp_path / "made_up")
    record_embedded(record_text()[:20_000], tmp_path / "text")
    (told, screen), (real, plain) = info("made_up", tmp_path), info("text", tmp_path)
    assert (told["as_of_random_tokens"], real["as_of_random_tokens"]) == (True, False)
    assert np.median(told["gini"]) > 10 * np.median(told["gini_by_chance"])
    words = " ".join(screen.split())
    assert "If the prompts were made up, record real ones." in words
    assert f"median Gini {np.median(told['gini']):.2f}; by chance {np.median(told['gini_by_chance']):.2f}" in words
    assert "random?" not in plain


def test_processes_of_srun_count_shards_that_count_sums(moeplan: Any, refuse: Any, info: Any, tmp_path: Path) -> None:
    moeplan("trace", "example", "gpt-oss-20b", cwd=tmp_path)
    shard = "trace", "count", "traces", "--shard", "-o", "shards"
    printed = [moeplan(*shard, cwd=tmp_path, SLURM_PROCID=str(n), SLURM_NTASKS="2").stdout for n in range(2)]
    assert printed[1].endswith("once all 2 shards are there: moeplan trace count shards -o counts\n")
    assert "counted   0 tokens" in printed[0]  # there is one part
    moeplan("trace", "count", "shards", "-o", "counts", "--workers", "2", cwd=tmp_path)
    moeplan("trace", "count", "traces", "-o", "alone", cwd=tmp_path)
    counts, alone = (next((tmp_path / name).iterdir()).read_bytes() for name in ("counts", "alone"))
    assert counts == alone
    refuse(*shard, cwd=tmp_path, code=2, words="--shard without SLURM_PROCID")
    refuse(*shard, "--shard-of", "0/2", cwd=tmp_path, code=2, words="--shard-of 0/2 names it; give one of them")
    refuse("trace", "count", "counts", "--shard-of", "0/2", "-o", "x", cwd=tmp_path, code=2, words="counts already")
    refuse("trace", "info", "--workers", "many", cwd=tmp_path, code=2, words="expected auto, a number of processes")
