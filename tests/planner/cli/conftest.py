"""Running the installed command line as a user does: a process in a folder of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.warm import Finished, warm

Run = Callable[..., Finished]
ROOMS = ("planner", "profilers", "solvers", "traces")
MAIN = "-m", "moeplan.planner.cli"
TALKATIVE = "from moeplan.planner.cli import main, screen; screen.LINE_S = 0.0; main()"
PATIENCE_S = 600.0  # on a busy machine


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
        return expected(python(*MAIN, *args, cwd=cwd, **environ), code)

    return run


@pytest.fixture(scope="session")
def refuse(moeplan: Run) -> Run:
    """`refuse(*args, cwd=..., code=..., words=...)`: the words are in one line, and nothing is printed or written."""

    def run(*args: object, cwd: Path, code: int, words: str) -> Finished:
        before = contents(cwd)
        done = moeplan(*args, cwd=cwd, code=code)
        assert words in done.stderr
        assert done.stderr.startswith("moeplan: ")
        assert done.stderr.count("\n") == 1
        assert not done.stdout
        assert contents(cwd) == before
        return done

    return run


def contents(folder: Path) -> dict[Path, int]:
    """When each file below a folder was written, of folders nothing."""
    return {path: path.stat().st_mtime_ns if path.is_file() else 0 for path in folder.rglob("*")}


def python(*args: object, cwd: Path | None = None, **environ: str) -> Finished:
    """An interpreter that has run."""
    command, env = [sys.executable, *map(str, args)], surroundings(environ)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE_S)


def started(*args: object, cwd: Path, **environ: str) -> "subprocess.Popen[str]":
    """`moeplan` that still runs, and says on stderr all of its progress, not some every ten seconds."""
    command, env = [sys.executable, "-c", TALKATIVE, *map(str, args)], surroundings(environ)
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until_said(process: "subprocess.Popen[str]", pattern: str) -> None:
    """Read what a process says on stderr up to a line in which the pattern is."""
    assert process.stderr is not None
    watchdog = threading.Timer(PATIENCE_S, process.kill)
    watchdog.start()
    lines = iter(process.stderr.readline, "")
    try:
        assert any(re.search(pattern, line) for line in lines), f"{process.args!r} ended before it said {pattern}"
    finally:
        watchdog.cancel()


def ended(process: "subprocess.Popen[str]", by: signal.Signals, code: int) -> str:
    """What a process says on stderr that ends by a signal."""
    process.send_signal(by)
    output, errors = process.communicate(timeout=PATIENCE_S)
    return expected(Finished(process.args, process.returncode, output, errors), code).stderr


def surroundings(environ: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "COLUMNS": "80", **environ}


def expected(done: Finished, code: int) -> Finished:
    """The process, had it the exit code that was expected."""
    assert done.returncode == code, f"{done.args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done
