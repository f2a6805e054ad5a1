"""`make test-engines` only: these tests read exports with the engines' own code, from wheels that it downloads."""

import os
from pathlib import Path

import pytest

collect_ignore_glob = [] if "MOEPLAN_ENGINES" in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def engine_wheels() -> Path:
    """The folder that the wheels are unpacked in."""
    return Path(os.environ["MOEPLAN_ENGINES"]).absolute()
