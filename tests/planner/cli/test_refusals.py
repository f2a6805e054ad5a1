"""What a user may get wrong: one clear line on stderr, the right exit code, no file."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.runtime.plan import load, save
from tests.builders import known
from tests.planner.makers import edited, planned


@pytest.fixture(scope="module")
def folder(make_trace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a good trace, a good plan and many bad files."""
    home = tmp_path_factory.mktemp("refusals")
    trace = make_trace()
    (home / "traces").symlink_to(trace.path)
    planned(trace, cluster="1x2", to=home / "plan.json")
    text = (home / "plan.json").read_text()
    (home / "binary.json").write_bytes(os.urandom(4096))
    (home / "edited.json").write_text(text.replace('"num_nodes": 1', '"num_nodes": 2', 1))
    (home / "empty").mkdir()
    (home / "folder.html").mkdir()
    (home / "junk").mkdir()
    (home / "junk" / "part-0-1-0.parquet").write_bytes(b"PAR1 not really PAR1")
    np.save(home / "floats.npy", np.ones((10, 2, 2)))
    np.save(home / "good.npy", np.arange(40, dtype=np.uint8).reshape(10, 2, 2) % 8)
    (home / "cluster.yaml").write_text("num_nodes: [1, 2]\n")
    (home / "exotic.yaml").write_text("num_nodes: !!timestamp x\n")
    (home / "lacking.csv").write_text("layer,expert,tokens\n0,1,2\n")
    os.mkfifo(home / "pipe")
    (home / "book.bin").write_bytes(b"\xff\xfe" * 100)
    return home


REFUSALS = [
    (("solve", "--trace", "nowhere", "--cluster", "1x2"), 3, "nowhere"),
    (("solve", "--trace", "empty", "--cluster", "1x2"), 3, "empty"),
    (("solve", "--trace", "junk", "--cluster", "1x2"), 3, "part-0-1-0.parquet"),
    (("solve", "--trace", "nosuch"), 3, ": nosuch: no such file or directory"),
    (("solve", "--trace", "nosuch:2", "--profile", "none.json"), 3, ": nosuch: no such file or directory"),
    (("solve",), 2, "--cluster NxG"),
    (("solve", "--cluster", "four"), 2, "NxG"),
    (("solve", "--cluster", "1x2", "--phase", "decode"), 2, "decode"),
    (("solve", "--cluster", "1x2", "--wire", "int4"), 2, "'int4' is not"),
    (
        ("solve", "--cluster", "1x2", "--wire", "fp8", "--strategy", "netmoe"),
        2,
        "fp8 rows with --strategy netmoe, under mi",
    ),
    (
        ("solve", "--cluster", "1x2", "--wire", "fp8", "--dispatch", "coherent"),
        2,
        "under coherent dispatch; expected st",
    ),
    (("solve", "--cluster", "1x2", "--wire", "fp8", "--engine", "sglang"), 2, "--engine sglang with --wire fp8"),
    (("solve", "--cluster", "1x2", "--profile", "none.json"), 3, "none.json"),
    (("solve", "--cluster", "1x2", "--link", "inter=fast"), 2, "GBps"),
    (("solve", "--link", "inter=25:4.5"), 2, "--cluster"),
    (("certify", "plan.json", "--profile", "none.json"), 3, "none.json"),
    (("apply", "plan.json", "--profile", "none.json"), 3, "none.json"),
    (("solve", "--cluster", "1x2", "--strategy", "magic"), 2, "exflow"),
    (("solve", "--cluster", "1x2", "-o", "plan.json/inside"), 7, "plan.json"),
    (("show", "binary.json"), 3, "binary.json"),
    (("show", "edited.json"), 3, "plan_sha256"),
    (("certify", "plan.json", "--trace", "junk"), 3, "junk"),
    (("apply", "edited.json"), 3, "plan_sha256"),
    (("apply", "plan.json", "--", "no-such-command-here"), 2, "no-such-command-here"),
    (("trace", "info", "book.bin"), 3, "book.bin"),
    (("trace", "import", "floats.npy", "-o", "out"), 3, "floats.npy"),
    (("trace", "import", "book.bin", "-o", "out"), 3, "book.bin"),
    (
        ("trace", "import", "lacking.csv", "-o", "out"),
        3,
        "without the column count; its header has layer, expert, to",
    ),
    (("trace", "import", "good.npy", "-o", "traces"), 2, "not empty"),
    (("trace", "record", "embedded", "--text", "book.bin", "-o", "out"), 3, "UTF-8"),
    (("profile", "--link", "inter=1:1"), 2, "--cluster"),
    (("profile", "--cluster", "cluster.yaml"), 3, "cluster.yaml"),
    (("profile", "--ranks", "0"), 2, "expected 1 to"),
    (("profile", "--device", "tpu"), 2, "tpu"),
    (("solve", "--cluster", "1x2", "--samples-per-step", "9" * 20), 2, "below 2^31"),
    (("solve", "--tokens-per-step", "1e30"), 2, "'--tokens-per-step': '1e30'; expected a valid integer"),
    (("solve", "--cluster", "2x2", "--link", "inter=1e30:5"), 2, "link 'inter=1e30:5'; expected KIND=GBps:us"),
    (("solve", "--cluster", "2x2", "--link", "inter=1e30:5"), 2, "; at most 1,000,000 GB/s, and less than an hour"),
    (("compare", "plan.json", "-o", "bytes.json"), 2, "name it .html"),
    (("solve", "--cluster", "1x2", "-o", "/dev/null"), 7, "no regular file"),
    (("solve", "--no-such-flag"), 2, "--no-such-flag"),
    (("solve", "--from", "none.json"), 3, "none.json"),
    (("solve", "--from", "plan.json", "--cluster", "1x4"), 2, "leave --cluster out"),
    (("solve", "--cluster", "1x2", "--learning-curve", "-o", "folder.html"), 7, "no regular file"),
    (("compare", "plan.json", "-o", "folder.html"), 7, "no regular file"),
    (("profile", "-o", "plan.json/inside"), 7, "cannot be written (Not a directory)"),
    (("solve", "--cluster", "1x2", "--learning-curve", "-o", "curve.json"), 2, "name it .html"),
    (("profile", "--timeout", "inf"), 2, "1 to 86400"),
    (("profile", "--cluster", "exotic.yaml"), 3, "not YAML"),
    (("trace", "import", "good.npy", "-o", "out", "--num-experts", "0"), 2, "--num-experts"),
    (("trace", "info", "pipe"), 3, "a pipe or device"),
    (("show", "pipe"), 3, "expected a regular file"),
    (("trace", "record", "embedded", "--text", "pipe", "-o", "out"), 3, "expected a regular file"),
    (("nonsense",), 2, "nonsense"),
    (("demo", "-o", "empty/../junk"), 2, "not empty"),
]


@pytest.mark.parametrize(("args", "code", "words"), REFUSALS, ids=[" ".join(row[0]) for row in REFUSALS])
def test_it_is_refused_in_one_line_with_its_code_and_nothing_is_written(
    refuse: Any, folder: Path, args: tuple[str, ...], code: int, words: str
) -> None:
    refuse(*args, cwd=folder, code=code, words=words)


def test_certify_takes_the_plans_own_trace_and_without_any_says_which_to_give(
    moeplan: Any, folder: Path, tmp_path: Path
) -> None:
    plan = load(folder / "plan.json")
    source = known(plan.inputs.trace)
    own = moeplan("certify", "plan.json", cwd=folder).stdout
    assert own == moeplan("certify", "plan.json", "--trace", source.path, cwd=folder).stdout
    assert re.match(r"certified plan\.json against .+: [1-9]\d* figures recomputed", " ".join(own.split()))
    save(edited(plan, "inputs.trace.path", "gone"), tmp_path / "plan.json")
    done = moeplan("certify", "plan.json", cwd=tmp_path, code=3)
    assert done.stdout.startswith("NOT certified plan.json: structure only")
    words = f"its trace gone (hash {source.sha256[:12]}..) is not here as it was; give it with --trace"
    assert done.stderr == f"moeplan: plan.json: not certified: {words}\n"
    assert json.loads(moeplan("certify", "plan.json", "--json", cwd=tmp_path, code=3).stdout)["replayed"] is False
    given = json.loads(moeplan("certify", "plan.json", "--trace", folder / "traces", "--json", cwd=tmp_path).stdout)
    assert given["replayed"] is True


def test_a_plan_without_an_evaluation_is_not_certified_by_its_trace(moeplan: Any, folder: Path, tmp_path: Path) -> None:
    bare = load(folder / "plan.json").model_copy(update={"evaluation": None, "verdict": None})
    save(bare, tmp_path / "plan.json")
    done = moeplan("certify", "plan.json", cwd=tmp_path, code=3)
    assert done.stdout.startswith("NOT certified plan.json against")
    assert "the plan has no evaluation to recompute; re-run moeplan solve" in done.stderr


def test_an_edited_figure_is_found_by_certify_with_code_5(refuse: Any, folder: Path, tmp_path: Path) -> None:
    plan = edited(load(folder / "plan.json"), "evaluation.held_out.contenders.0.metrics.hops_kept.value", 0.01)
    save(plan, tmp_path / "plan.json")
    refuse("certify", "plan.json", "--trace", folder / "traces", cwd=tmp_path, code=5, words="hops_kept")
