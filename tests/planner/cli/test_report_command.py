"""`moeplan report`: its page and card, the command on it, what it leaves out, and what it refuses in a line."""

import json
import re
import shlex
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from moeplan.runtime.plan import load, save
from tests.planner.makers import edited

SOLVE = ("solve", "--strategy", "eplb", "--cluster", "2x2", "--link", "inter=50:5", "--link", "intra=200:2")
ASKED = ("--redundant", "4", "--pin", "3@1", "--pin", "0@2", "--tokens-per-step", "64", "--seed", "7")


@pytest.fixture(scope="module")
def home(moeplan: Any, make_trace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a trace and a plan."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "traces").symlink_to(make_trace(samples=80).path)
    moeplan(*SOLVE, *ASKED, cwd=folder)
    return folder


def test_a_page_and_a_card_are_written_where_asked_for(moeplan: Any, home: Path) -> None:
    assert moeplan("report", "plan.json", cwd=home).stdout == "wrote     report.html\n"
    told, card = (
        json.loads(moeplan("report", "plan.json", "-o", name, "--json", cwd=home).stdout)
        for name in ("report.html", "card.svg")
    )
    assert (card["output"], card["sections"], card["certificate"]["replayed"]) == ("card.svg", [], True)
    assert told["left_out"] == []
    assert {"Load of devices", "Bytes between devices", "What it rests on", "What to type next"} <= {*told["sections"]}
    assert (home / "card.svg").read_text().startswith("<svg ")
    page = (home / "report.html").read_text()
    assert "moeplan apply plan.json --engine vllm -o DIR" in page
    assert "refused: tutel takes pipeline degrees" in page


def test_the_command_on_the_page_makes_the_plan_again(moeplan: Any, home: Path, tmp_path: Path) -> None:
    moeplan("report", "plan.json", cwd=home)
    (command,) = re.findall(r"<td>made by</td><td>(moeplan solve .*?)</td>", (home / "report.html").read_text())
    _, *words = shlex.split(unescape(command))
    moeplan(*words, "-o", str(tmp_path / "again.json"), cwd=home)
    first, again = load(home / "plan.json"), load(tmp_path / "again.json")
    assert again.plan_sha256 == first.plan_sha256
    assert again.evaluation == first.evaluation


def test_a_plan_whose_trace_is_gone_is_told_in_one_line(moeplan: Any, home: Path, tmp_path: Path) -> None:
    save(load(home / "plan.json"), tmp_path / "plan.json")
    left_out, wrote = moeplan("report", "plan.json", cwd=tmp_path).stdout.splitlines()
    assert left_out.startswith("left out: loads of devices, bytes between them: its trace traces (hash ")
    assert left_out.endswith("is not here as it was; give it with --trace")
    assert wrote == "wrote     report.html"
    back = moeplan("report", "plan.json", "--trace", str(home / "traces"), cwd=tmp_path).stdout
    assert back == "wrote     report.html\n"


def test_what_cannot_be_written_or_certified_is_refused_in_a_line(refuse: Any, home: Path) -> None:
    before = {*home.iterdir()}
    refuse("report", "plan.json", "-o", "report.pdf", cwd=home, code=2, words="name it .html or .svg")
    refuse("report", "plan.json", "-o", "plan.json/report.html", cwd=home, code=7, words="plan.json")
    refuse("report", "missing.json", cwd=home, code=3, words="missing.json")
    refuse("show", "plan.json", "-o", "page.html", cwd=home, code=2, words="moeplan report plan.json -o page.html")
    plan = load(home / "plan.json")
    forged = edited(plan, "evaluation.held_out.contenders.0.metrics.balance.value", 1.0)
    save(forged, home / "forged.json")
    refuse("report", "forged.json", "-o", "forged.html", cwd=home, code=5, words="the recount")
    assert {*home.iterdir()} - before == {home / "forged.json"}
