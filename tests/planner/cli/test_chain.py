"""The main job, as typed: profile, solve, apply in an empty directory without flags, and what else looks at it."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.planner.cli.conftest import ended, started, wait_until_said

MEASURED = r"^moeplan: \d+ of \d+ sizes"
ROUTER = "import moeplan.runtime as r; print(r.load_plan().plan_sha256)"


@pytest.fixture(scope="module")
def home(fresh_moeplan: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the three commands ran one after another; on a busy CPU the plan may not pay."""
    folder = tmp_path_factory.mktemp("home")
    done = fresh_moeplan("profile", "--quick", cwd=folder)
    assert "TOY model" in " ".join(done.stdout.split())
    assert done.stdout.endswith("next: moeplan solve\n")
    fresh_moeplan("solve", "--strategy", "exflow", cwd=folder)
    fresh_moeplan("apply", "plan.json", "--force", cwd=folder)
    return folder


def test_the_three_commands_leave_their_four_files_and_a_plan_that_is_judged_by_seconds(home: Path) -> None:
    assert {path.name for path in home.iterdir()} == {"profile.json", "traces", "plan.json", ".moeplan"}
    assert (home / ".moeplan" / "active.json").read_bytes() == (home / "plan.json").read_bytes()
    plan = json.loads((home / "plan.json").read_text())
    assert (plan["cluster"]["devices_per_node"], [*plan["cluster"]["links"]]) == (4, ["intra"])
    assert [plan["inputs"][name]["path"] for name in ("profile", "trace")] == ["profile.json", "traces"]
    ours, theirs = (plan["evaluation"]["held_out"]["contenders"][i]["metrics"] for i in (0, 1))
    assert ours["device_copies"]["value"] < 0.8 * theirs["device_copies"]["value"]
    profile = json.loads((home / "profile.json").read_text())
    curves = {key for key, series in profile["series"].items() if series["fit"]}
    lacking = profile["origins"][0]["missing"].keys() - curves  # for which a busy CPU had no time
    assert lacking or plan["verdict"]["metric"] == "step_s"
    assert lacking or not plan["options"]["seconds"]["missing"]


def test_apply_certifies_against_the_plans_own_trace_and_profile(moeplan: Any, home: Path) -> None:
    said = " ".join(moeplan("apply", "plan.json", "--force", cwd=home).stdout.split())
    assert "against traces" in said
    listed = " ".join(moeplan("certify", "plan.json", cwd=home).stdout.split())
    assert "predicted seconds, verdict" in listed
    assert "unchecked solver seconds, status, method and backend" in listed
    number = len(json.loads(moeplan("certify", "plan.json", "--json", cwd=home).stdout)["unchecked"])
    assert f"; {number} claims unchecked: moeplan certify" in said
    verdict = json.loads((home / "plan.json").read_text())["verdict"]
    doubts = ["no benefit", "gain not certain", "worse than today"]
    words = {"benefit": ["benefit: "], "none": doubts}[verdict["value"]]  # as it measured
    assert any(one in said for one in words)


def test_a_command_started_by_apply_finds_the_plan_and_prints_after_the_json(moeplan: Any, home: Path) -> None:
    done = moeplan("apply", "plan.json", "--force", "--json", "--", sys.executable, "-c", ROUTER, cwd=home)
    *document, last = done.stdout.splitlines()
    assert last == json.loads((home / "plan.json").read_text())["plan_sha256"]
    assert json.loads("".join(document))["active"] == ".moeplan/active.json"


@pytest.mark.parametrize(
    "args",
    [
        ("show",),
        ("certify", "plan.json", "--trace", "traces", "--profile", "profile.json"),
        ("certify", "plan.json"),
        ("apply", "--force"),
        ("solve", "--strategy", "eplb", "--cluster", "2x2", "--redundant", "4", "-o", "other.json"),
        ("trace", "info"),
        ("trace", "count", "traces", "-o", "counts"),
        ("profile", "--cluster", "2x8", "--link", "inter=25:4.5", "-o", "described.json"),
    ],
    ids=" ".join,
)
def test_json_is_one_document_on_stdout_and_text_fits_80_columns(moeplan: Any, home: Path, args: Any) -> None:
    json.loads(moeplan(*args, "--json", cwd=home).stdout)
    if args[:2] == ("trace", "count"):
        args = (*args[:-1], "counts-again")
    lines = moeplan(*args, cwd=home).stdout.splitlines()
    assert lines
    if args[0] in ("show", "solve"):
        assert max(map(len, lines)) <= 80


def test_the_embedded_model_records_a_users_own_text(moeplan: Any, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("To be, or not to be, that is the question.\n" * 40)
    moeplan("trace", "record", "embedded", "--text", "book.txt", "-o", "mine", "--sample-tokens", "32", cwd=tmp_path)
    info = json.loads(moeplan("trace", "info", "mine", "--json", cwd=tmp_path).stdout)
    assert (info["num_tokens"], info["num_samples"]) == (1696, 53)


def test_ctrl_c_during_profile_ends_with_130_and_keeps_only_an_incomplete_profile(tmp_path: Path) -> None:
    process = started("profile", "--ranks", "2", cwd=tmp_path)
    wait_until_said(process, MEASURED)
    assert "interrupted" in ended(process, signal.SIGINT, 130)
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
    assert json.loads((tmp_path / "profile.json").read_text())["complete"] is False


def test_sigterm_during_profile_leaves_neither_scratch_nor_processes(tmp_path: Path) -> None:
    """Nor a profile, unless it is one so far: those are kept every 15 seconds."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = started("profile", "--ranks", "2", cwd=tmp_path, TMPDIR=str(scratch))
    wait_until_said(process, MEASURED)
    ended(process, signal.SIGTERM, 143)
    assert {path.name for path in tmp_path.rglob("*")} - {"profile.json.partial"} == {"scratch"}
