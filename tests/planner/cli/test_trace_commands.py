"""`moeplan trace import`, `info` and `count` on both forms of a trace, as typed."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def home(moeplan: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trace from JSON lines in `traces`, its counts in `counts` and counts from CSV in `csv`."""
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
    return folder


def test_info_tells_what_a_token_trace_holds(moeplan: Any, home: Path) -> None:
    found = json.loads(moeplan("trace", "info", "traces", "--json", cwd=home).stdout)
    assert (found["form"], found["num_tokens"], found["num_samples"]) == ("tokens", 600, 30)
    assert found["model"]["name"] == "mine"
    assert min(found["locality"]) > 0.4  # each half of the samples has half of the experts
    assert found["affinity_information"]["bits"][0] > 0.9 > 0.2 > found["affinity_information"]["shuffled"][0]
    text = moeplan("trace", "info", "traces", cwd=home).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "locality" in text


def test_info_tells_what_counts_hold_and_what_they_do_not(moeplan: Any, home: Path) -> None:
    tokens = json.loads(moeplan("trace", "info", "traces", "--json", cwd=home).stdout)
    found = json.loads(moeplan("trace", "info", "counts", "--json", cwd=home).stdout)
    assert found["form"] == "counts"
    assert found["skew"] == tokens["skew"]
    assert found["locality"] == tokens["locality"]
    assert found.keys() == tokens.keys()
    assert found["num_tokens"] is found["affinity"] is found["affinity_information"] is found["phase_tokens"] is None
    text = moeplan("trace", "info", "counts", cwd=home).stdout
    assert "not there" in text
    assert max(map(len, text.splitlines())) <= 80


def test_info_names_the_hidden_layers_where_they_are_not_the_ordinals(moeplan: Any, home: Path) -> None:
    moeplan("trace", "import", "r.csv", "-o", "sparse", cwd=home)
    found = moeplan("trace", "info", "sparse", cwd=home).stdout.splitlines()
    (head,) = (row for row, line in enumerate(found) if line.startswith("layer hidden  load"))
    assert [line.split()[:2] for line in found[head + 1 : head + 3]] == [["0", "3"], ["1", "5"]]
    assert max(map(len, found)) <= 80
    assert "hidden" not in moeplan("trace", "info", "traces", cwd=home).stdout


def test_info_draws_a_page(moeplan: Any, home: Path, tmp_path: Path) -> None:
    done = moeplan("trace", "info", "traces", "--plot", tmp_path / "out.html", cwd=home)
    assert f"wrote     {tmp_path / 'out.html'}" in done.stdout
    text = (tmp_path / "out.html").read_text()
    assert "Co-activation" in text
    assert "Transitions" in text
    moeplan("trace", "info", "counts", "--plot", tmp_path / "missing" / ".." / "counts.html", cwd=home)
    assert (tmp_path / "counts.html").is_file()


def test_counts_of_csv_are_added_up_by_count(moeplan: Any, home: Path, tmp_path: Path) -> None:
    done = moeplan("trace", "import", home / "r.csv", "-o", "csv", "--top-k", "2", cwd=tmp_path)
    assert re.search(r"imported  counts( of \d+ tokens)?, 2 layers x 2 experts, top-2", done.stdout)
    assert "model     r, after the file; --name says another" in done.stdout
    named = moeplan("trace", "import", home / "r.csv", "-o", "named", "--name", "r", cwd=tmp_path).stdout
    assert "model     r\n" in named
    done = moeplan("trace", "count", "csv", "-o", (tmp_path / "again").as_uri(), "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["by"] == ["step"]
    found = json.loads(moeplan("trace", "info", "again", "--json", cwd=tmp_path).stdout)
    assert (found["num_rows"], found["num_steps"], found["model"]["layer_ids"]) == (2, 2, [3, 5])
    done = moeplan("trace", "count", "csv", "-o", "third", "--phase", "decode", cwd=tmp_path, code=2)
    assert "--phase" in done.stderr


def test_a_place_that_is_not_local_is_refused_as_output(moeplan: Any, home: Path, tmp_path: Path) -> None:
    for args in (("import", home / "r.csv"), ("count", home / "traces")):
        done = moeplan("trace", *args, "-o", "s3://bucket/traces", cwd=tmp_path, code=2)
        assert "written to local ones only" in done.stderr
    assert not list(tmp_path.iterdir())
