"""What is compiled is compiled before it is needed, in a time that is told apart."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "words",
    ["exflow 2x2", "exflow 1x4", "netmoe sum 2x2", "netmoe bottleneck 2x4", "eplb 1,16", "eplb 5,6,16"],
)
def test_a_solve_compiles_nothing_more(words: str) -> None:
    subprocess.run([sys.executable, "-m", "tests.solvers.warmth", *words.split()], cwd=ROOT, check=True, timeout=300)
