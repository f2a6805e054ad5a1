"""Running the installed command line as a user does: a process in a folder of its own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.warm import Finished, warm

Run = Callable[..., Finished]
ROOMS = ("planner", "profilers", "solvers", "traces")


@pytest.fixture(scope="session")
def moeplan() -> Iterator[Run]:
    """`moeplan(*args, cwd=..., code=0, **environ)`: the finished process, whose exit code is as expected.

    It has imported everything before; `fresh_moeplan` has not.
    """
    packages = [f"moeplan.{room}" for room in ROOMS]
    with warm("moeplan.planner.cli", "main", *packages, env=os.environ) as start:

        def run(*args: object, cwd: Path, code: int = 0, **environ: str) -> Finished:
            return expected(start([*map(str, args)], cwd, surroundings(environ)), code)

        yield run


@pytest.fixture(scope="session")
def fresh_moeplan() -> Run:
    """`fresh_moeplan(*args, cwd=..., code=0, **environ)`: the same in an interpreter of its own."""

    def run(*args: object, cwd: Path, code: int = 0, **environ: str) -> Finished:
        command = [sys.executable, "-m", "moeplan.planner.cli", *map(str, args)]
        env = surroundings(environ)
        return expected(subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, env=env), code)

    return run


def surroundings(environ: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "COLUMNS": "80", **environ}


def expected(done: Finished, code: int) -> Finished:
    """The process, had it the exit code that was expected."""
    assert done.returncode == code, f"{done.args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done
