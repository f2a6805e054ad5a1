"""What a user may get wrong: one clear line on stderr, the right exit code, no file."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.planner.cli.conftest import expected, python
from tests.planner.makers import planned


@pytest.fixture(scope="module")
def folder(make_trace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a good trace, a good plan and many bad files."""
    home = tmp_path_factory.mktemp("refusals")
    trace = make_trace()
    (home / "traces").symlink_to(trace.path)
    planned(trace, cluster="1x2", to=home / "plan.json")
    text = (home / "plan.json").read_text()
    (home / "truncated.json").write_text(text[: len(text) // 2])
    (home / "binary.json").write_bytes(os.urandom(4096))
    (home / "deep.json").write_text("[" * 100_000)
    (home / "nan.json").write_text(text.replace('"seed": 0', '"seed": NaN', 1))
    (home / "edited.json").write_text(text.replace('"num_nodes": 1', '"num_nodes": 2', 1))
    (home / "newer.json").write_text(text.replace('"schema_version": 1', '"schema_version": 99', 1))
    (home / "empty.json").write_text("")
    (home / "empty").mkdir()
    (home / "folder.html").mkdir()
    (home / "junk").mkdir()
    (home / "junk" / "part-0-1-0.parquet").write_bytes(b"PAR1 not really PAR1")
    np.save(home / "floats.npy", np.ones((10, 2, 2)))
    np.save(home / "good.npy", np.arange(40, dtype=np.uint8).reshape(10, 2, 2) % 8)
    (home / "cluster.yaml").write_text("num_nodes: [1, 2]\n")
    (home / "exotic.yaml").write_text("num_nodes: !!timestamp x\n")
    os.mkfifo(home / "pipe")
    (home / "book.bin").write_bytes(b"\xff\xfe" * 100)
    return home


REFUSALS = [
    (("solve", "--trace", "nowhere", "--cluster", "1x2"), 3, "nowhere"),
    (("solve", "--trace", "empty", "--cluster", "1x2"), 3, "empty"),
    (("solve", "--trace", "junk", "--cluster", "1x2"), 3, "part-0-1-0.parquet"),
    (("solve",), 2, "--cluster NxG"),
    (("solve", "--cluster", "0x4"), 2, "0x4"),
    (("solve", "--cluster", "four"), 2, "NxG"),
    (("solve", "--cluster", "999999x999999"), 2, "at most"),
    (("solve", "--cluster", "1x2", "--phase", "decode"), 2, "decode"),
    (("solve", "--cluster", "1x2", "--profile", "none.json"), 3, "none.json"),
    (("solve", "--cluster", "1x2", "--profile", "binary.json"), 3, "binary.json"),
    (("solve", "--cluster", "1x2", "--link", "inter=fast"), 2, "GBps"),
    (("solve", "--link", "inter=25:4.5"), 2, "--cluster"),
    (("solve", "--cluster", "2x1", "--link", "inter=1:1", "--link", "inter=2:2"), 2, "two links inter"),
    (("solve", "--cluster", "1x2", "--link", "inter=1:1"), 2, "two or more nodes"),
    (("solve", "--cluster", "2x1", "--strategy", "netmoe", "--time-limit", "0.0001"), 2, "it is a flag of exflow"),
    (("certify", "plan.json", "--profile", "none.json"), 3, "none.json"),
    (("apply", "plan.json", "--profile", "none.json"), 3, "none.json"),
    (("solve", "--cluster", "1x2", "--strategy", "magic"), 2, "exflow"),
    (("solve", "--cluster", "1x2", "-o", "plan.json/inside"), 7, "plan.json"),
    (("show", "none.json"), 3, "none.json"),
    (("show", "truncated.json"), 3, "truncated.json"),
    (("show", "binary.json"), 3, "binary.json"),
    (("show", "deep.json"), 3, "nested too deeply"),
    (("show", "nan.json"), 3, "NaN"),
    (("show", "edited.json"), 3, "plan_sha256"),
    (("show", "newer.json"), 3, "99"),
    (("show", "empty.json"), 3, "empty.json"),
    (("show", "traces"), 3, "traces"),
    (("certify", "plan.json", "--trace", "junk"), 3, "junk"),
    (("apply", "edited.json"), 3, "plan_sha256"),
    (("apply", "plan.json", "--", "no-such-command-here"), 2, "no-such-command-here"),
    (("trace", "info", "nowhere"), 3, "nowhere"),
    (("trace", "info", "book.bin"), 3, "book.bin"),
    (("trace", "import", "floats.npy", "-o", "out"), 3, "floats.npy"),
    (("trace", "import", "book.bin", "-o", "out"), 3, "book.bin"),
    (("trace", "import", "good.npy", "-o", "traces"), 2, "not empty"),
    (("trace", "record", "gpt-5", "--text", "plan.json", "-o", "out"), 2, "embedded"),
    (("trace", "record", "embedded", "--text", "book.bin", "-o", "out"), 3, "UTF-8"),
    (("trace", "record", "embedded", "--text", "empty.json", "-o", "out"), 2, "does not fill a sample"),
    (("trace", "count", "nowhere", "-o", "out"), 3, "nowhere"),
    (("profile", "--link", "inter=1:1"), 2, "--cluster"),
    (("profile", "--cluster", "2x8", "--link", "inter=fast"), 2, "GBps"),
    (("profile", "--cluster", "cluster.yaml"), 3, "cluster.yaml"),
    (("profile", "--ranks", "0"), 2, "expected 1 to"),
    (("profile", "--device", "tpu"), 2, "tpu"),
    (("solve", "--cluster", "1x2", "--samples-per-step", "9" * 20), 2, "below 2^31"),
    (("compare", "plan.json", "-o", "bytes.json"), 2, "name it .html"),
    (("solve", "--cluster", "1x2", "-o", "/dev/null"), 7, "no regular file"),
    (("solve", "--no-such-flag"), 2, "--no-such-flag"),
    (("solve", "--from", "none.json"), 3, "none.json"),
    (("solve", "--from", "plan.json", "--cluster", "1x4"), 2, "leave --cluster out"),
    (("solve", "--from", "plan.json", "--strategy", "eplb"), 2, "only exflow re-plans"),
    (("solve", "--cluster", "1x2", "--learning-curve", "-o", "folder.html"), 7, "no regular file"),
    (("compare", "plan.json", "-o", "folder.html"), 7, "no regular file"),
    (("profile", "-o", "plan.json/inside"), 7, "plan.json is no directory"),
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


def full_disk(folder: Path, most_bytes: int, *args: str, **environ: str) -> Any:
    """`moeplan solve` where no file may have more bytes: it ends with 7 and says so in one line."""
    code = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({most_bytes}, {most_bytes}))
sys.argv = {["moeplan", "solve", *args]!r}
from moeplan.planner.cli import main
main()
"""
    done = expected(python("-c", code, cwd=folder, **environ), 7)
    assert done.stderr.count("\n") == 1
    return done


def test_a_full_disk_leaves_the_old_plan_as_it_was(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("the old plan")
    full_disk(tmp_path, 1000, "--trace", str(folder / "traces"), "--cluster", "1x2")
    assert (tmp_path / "plan.json").read_text() == "the old plan"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("target", ["plan.json", "newer/plan.json"])
def test_a_full_disk_leaves_no_predictor_behind(folder: Path, tmp_path: Path, target: str) -> None:
    args = ["--strategy", "netmoe", "--trace", str(folder / "traces"), "--samples-per-step", "4", "--cluster", "2x2"]
    done = full_disk(tmp_path, 3000, *args, "-o", target, NUMBA_DISABLE_JIT="1")
    assert done.stderr.startswith(f"moeplan: {target}: ")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_cluster_of_a_base_may_be_said_again(moeplan: Any, folder: Path, tmp_path: Path) -> None:
    moeplan("solve", "--trace", folder / "traces", "--cluster", "2x2", "--dispatch", "standard", cwd=tmp_path)
    netmoe = ("solve", "--strategy", "netmoe", "--trace", folder / "traces", "--samples-per-step", "4")
    moeplan(*netmoe, "--on", "plan.json", "--cluster", "2x2", "-o", "homes.json", cwd=tmp_path)
    base, homes = (json.loads((tmp_path / name).read_text()) for name in ("plan.json", "homes.json"))
    assert homes["cluster"] == base["cluster"]


def test_an_edited_figure_is_found_by_certify_with_code_5(refuse: Any, folder: Path, tmp_path: Path) -> None:
    value = json.loads((folder / "plan.json").read_text())
    value["evaluation"]["held_out"]["contenders"][0]["metrics"]["hops_kept"]["value"] += 0.01
    (tmp_path / "plan.json").write_text(json.dumps(value))
    refuse("certify", "plan.json", "--trace", folder / "traces", cwd=tmp_path, code=5, words="hops_kept")
