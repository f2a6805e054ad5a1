"""A process whose workers sleep, to be interrupted or killed."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

LONG = """
import os, sys, time
from moeplan.workers import opened
if __name__ == "__main__":
    try:
        with opened(sys.argv[1]) as workers:
            print(workers.submit(os.getpid).result(), flush=True)
            list(workers.map(time.sleep, [(60,), (60,), (60,)]))
    finally:
        print("closed")
"""


def started(folder: Path, workers: str, env: Mapping[str, str] | None = None) -> tuple["subprocess.Popen[str]", int]:
    """A process once its tasks sleep, and the process of one of its workers."""
    script = folder / "script.py"
    script.write_text(LONG)
    process = subprocess.Popen(
        [sys.executable, "-I", str(script), workers],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=folder,
        env=os.environ | (env or {}),
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    time.sleep(0.5)
    return process, worker


def gone(pid: int) -> bool:
    """Wait until a process has ended, for five seconds."""
    for _ in range(50):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False
