"""README's commands print what README shows."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SEARCHED = "exflow"  # figures of a search differ in their last digit from one kind of machine to another


def block() -> tuple[list[str], list[str]]:
    """The commands of README's first session, and the lines that the last of them prints."""
    (session,) = re.findall(r"```\n(\$ moeplan trace example.*?)\n```", README, re.DOTALL)
    lines = session.split("\n")
    return [line[2:] for line in lines if line.startswith("$ ")], [line for line in lines if not line.startswith("$ ")]


def test_the_three_commands_print_what_readme_shows(tmp_path: Path) -> None:
    commands, shown = block()
    printed = ""
    for command in commands:
        words = [sys.executable, "-m", "moeplan.planner.cli", *shlex.split(command)[1:]]
        env = {**os.environ, "COLUMNS": "100"}
        printed = subprocess.run(words, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout
    ours, theirs = ([line for line in lines if SEARCHED not in line] for lines in (printed.splitlines(), shown))
    assert ours == theirs
    assert len(printed.splitlines()) == len(shown)


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", README))
def test_what_readme_links_to_is_there(link: str) -> None:
    assert (Path(__file__).parents[1] / link).exists()
