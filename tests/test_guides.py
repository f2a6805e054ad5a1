"""Commands of README and of the guides print what these show."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = ("README.md", "docs/start-serving.md", "docs/start-training.md", "docs/start-hardware.md")
UNSHOWN = "moeplan profile --preset"  # a command that needs none of the reader's files, also without its output
READERS = ("trace info traces", "--trace smart")  # commands on recordings that do not ship
SEARCHED = "exflow"  # figures of a search differ in their last digit from one kind of machine to another


def steps(guide: str) -> Iterator[tuple[str, str]]:
    """The commands of a guide that run anywhere, and what it shows of each; `...` stands for anything."""
    text = (ROOT / guide).read_text(encoding="utf-8")
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for part in re.split(rf"^(?=\$ |{UNSHOWN})", block, flags=re.MULTILINE):
            command, _, shown = part.partition("\n")
            if command.startswith("$ ") and not any(words in command for words in READERS):
                lines = ["..." if SEARCHED in line else line for line in shown.splitlines()]
                yield command[2:], "\n".join(lines) or "..."
            elif command.startswith(UNSHOWN):
                yield command, "..."


@pytest.mark.parametrize("guide", GUIDES)
def test_commands_print_what_the_guide_shows(guide: str, tmp_path: Path) -> None:
    for command, shown in steps(guide):
        words = [sys.executable, "-m", "moeplan.planner.cli", *shlex.split(command, comments=True)[1:]]
        env = {**os.environ, "COLUMNS": "100"}
        printed = subprocess.run(words, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout
        assert OutputChecker().check_output(shown, printed, ELLIPSIS | NORMALIZE_WHITESPACE), f"{command}:\n{printed}"


@pytest.mark.parametrize("guide", GUIDES)
def test_no_command_that_a_guide_shows_with_its_output_is_left_out(guide: str) -> None:
    lines = (ROOT / guide).read_text(encoding="utf-8").splitlines()
    prompts = [line.strip().removeprefix("$ ") for line in lines if line.lstrip().startswith("$ ")]
    own = [command for command in prompts if not any(words in command for words in READERS)]
    assert own
    assert any(UNSHOWN in line for line in lines) == any(command.startswith(UNSHOWN) for command, _ in steps(guide))
    assert own == [command for command, _ in steps(guide) if not command.startswith(UNSHOWN) or command in own]


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", README))
def test_what_readme_links_to_is_there(link: str) -> None:
    assert (ROOT / link).exists()
