import contextlib
import os
import pty
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from moeplan.planner.cli import screen
from moeplan.planner.cli.screen import HangingConsole, hung


def test_a_terminal_shows_what_is_done_with_the_seconds_since(monkeypatch: pytest.MonkeyPatch) -> None:
    seen_by, written_by = pty.openpty()
    with open(written_by, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        with screen.progress() as say:
            say("solving [exflow]")
            time.sleep(1.3)
    pieces = []
    with contextlib.suppress(OSError):  # EIO at the end
        while piece := os.read(seen_by, 1 << 16):
            pieces.append(piece)
    os.close(seen_by)
    shown = b"".join(pieces).decode()
    first, *_, last = [line for line in shown.split("\r\x1b[2K") if "solving [exflow]" in line]
    assert "0:00:00" in first
    assert "0:00:01" in last
    assert shown.endswith("\r\x1b[1A\x1b[2K")


def test_a_pipe_is_told_a_line_about_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with screen.progress() as say:
        for now in range(100, 126):
            say(f"trying {now}")
    assert capsys.readouterr().err == "moeplan: trying 110\nmoeplan: trying 120\n"


def test_a_pipe_is_told_what_has_begun_and_takes_long_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "LINE_S", 0.2)
    with screen.progress() as say:
        say("reading")
        say("solving")
        time.sleep(1)
    with screen.progress() as say:
        say("done before that")
    time.sleep(0.5)
    assert capsys.readouterr().err == "moeplan: solving\n"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("solved    in no time at all", "solved    in no time\n          at all"),
        ("left out  samples that a plan saw", "left out  samples\n          that a plan\n          saw"),
        ("unchecked seconds and the method", "unchecked seconds and\n          the method"),
        ("coherence gathers K and V everywhere", "coherence gathers K\n  and V everywhere"),
        ("in all 3 MB less than contiguous", "in all 3 MB less than\n  contiguous"),
        ("wrote     /a/path/that/is/longer/than/that", "wrote     /a/path/that/is/longer/than/that"),
        ("wrote     plan.json    next: it", "wrote     plan.json\n          next: it"),
        ("  0  ####  .....  kept", "  0  ####  .....\n  kept"),
        ("  0  ####    kept", "  0  ####    kept"),
    ],
)
def test_lines_go_on_below_the_text_of_their_label_or_by_two(line: str, told: str) -> None:
    assert hung(line, 21) == told


@given(st.lists(st.sampled_from(["solved    a", "b c", "unchecked", "  0 ##  #", "", "e" * 30])), st.integers(0, 40))
def test_no_word_is_lost_or_cut_and_lines_are_no_wider_than_they_must(lines: list[str], width: int) -> None:
    text = "\n".join(lines)
    told = hung(text, width).split("\n")
    assert [word for line in told for word in line.split()] == text.split()
    assert all(len(line) <= width or len(line.removeprefix("solved").split()) == 1 for line in told)
    assert hung(text, 50) == text


def test_a_console_hangs_text_and_leaves_tables_to_rich(capsys: pytest.CaptureFixture[str]) -> None:
    console, table = HangingConsole(20), Table("[bold]a[/]", box=None)
    table.add_row("b")
    console.print("a remark that is :smile: [red]long[/]")
    console.print()
    console.print(table)
    assert capsys.readouterr().out == "a remark that is\n  :smile:\n  [red]long[/]\n\n [bold]a[/] \n b          \n"
