import contextlib
import os
import pty
import sys
import time
from pathlib import Path

import pytest

from moeplan.planner.cli import screen


def read_to_end(terminal: int) -> str:
    """What was written to a terminal whose other end is closed; it comes in pieces."""
    pieces = []
    with contextlib.suppress(OSError):  # EIO at the end
        while piece := os.read(terminal, 1 << 16):
            pieces.append(piece)
    return b"".join(pieces).decode()


def test_a_terminal_shows_what_is_done_with_the_seconds_since_and_is_left_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen_by, written_by = pty.openpty()
    with open(written_by, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        with screen.progress() as say:
            say("solving [exflow]")
            time.sleep(1.3)
    shown = read_to_end(seen_by)
    os.close(seen_by)
    first, *_, last = [line for line in shown.split("\r\x1b[2K") if "solving [exflow]" in line]
    assert "0:00:00" in first
    assert "0:00:01" in last
    assert shown.endswith("\r\x1b[1A\x1b[2K")


def test_a_pipe_is_told_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = tmp_path / "stderr"
    with told.open("w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        with screen.progress() as say:
            say("solving")
    assert told.read_text() == ""
