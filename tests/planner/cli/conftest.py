"""Running the installed command line as a user does: a process in a folder of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def moeplan() -> Run:
    """`moeplan(*args, cwd=..., code=0)`: the finished process, whose exit code is as expected."""

    def run(*args: object, cwd: Path, code: int = 0, **environ: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "moeplan.planner.cli", *map(str, args)]
        done = subprocess.run(
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "COLUMNS": "80", **environ},
        )
        assert done.returncode == code, f"{args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    return run
