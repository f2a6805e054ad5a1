"""`--bound thorough` from the command line: its proof beside the plan, why it may be a simple one, and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SEARCHED_CPU_S = 8.0  # start, a second of search on two threads, and some of the bound, which would take a minute
THOROUGH = ["--time-limit", "1", "--bound", "thorough", "--fit-fraction", "1"]


@pytest.fixture(scope="module")
def home(moeplan: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of 24 experts that follow each other loosely."""
    folder, rng = tmp_path_factory.mktemp("bounded"), np.random.default_rng(1)
    ids = np.cumsum(rng.geometric(0.2, (4000, 18)), axis=1) % 24
    np.save(folder / "ids.npy", ids[:, :, None].astype(np.uint8))
    moeplan("trace", "import", "ids.npy", "-o", "traces", "--num-experts", "24", cwd=folder)
    return folder


def test_a_thorough_bound_is_proven_by_the_file_beside_the_plan(moeplan: Any, home: Path) -> None:
    done = moeplan("solve", "--cluster", "1x8", *THOROUGH, "--verbose", cwd=home)
    assert "three-layer bound" in " ".join(done.stdout.split())
    assert len(list(home.glob("bound-*.safetensors"))) == 1
    done = moeplan("certify", "plan.json", "--trace", "traces", cwd=home)
    assert "bound (by its prices)" in " ".join(done.stdout.split())


def test_a_bound_that_stays_simple_says_why(moeplan: Any, home: Path) -> None:
    done = moeplan("solve", "--cluster", "1x24", *THOROUGH, "--method", "sweeps", "--slots", "2", "-v", cwd=home)
    assert "no thorough bound of what stays on a device: slots hold replicas" in done.stdout


def cpu_s(process: "subprocess.Popen[str]") -> float:
    """Seconds that a running process has computed, however busy the machine."""
    assert process.poll() is None
    times = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def test_ctrl_c_during_the_bound_ends_with_130_and_keeps_the_plan_with_its_bound(moeplan: Any, home: Path) -> None:
    command = [sys.executable, "-m", "moeplan.planner.cli", "solve", "--cluster", "1x3", *THOROUGH, "-o", "cut.json"]
    process = subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while cpu_s(process) < SEARCHED_CPU_S:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    pressed = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - pressed < 15
    assert "Traceback" not in errors
    outcome = json.loads((home / "cut.json").read_text())["outcome"]["placement"]
    assert (outcome["status"], outcome["bound"] >= outcome["objective"]["value"]) == ("interrupted", True)
    moeplan("certify", "cut.json", "--trace", "traces", cwd=home)
