"""Profiles by known formulas, and traces whose experts have a known size."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moeplan.solvers.exflow import strategy
from moeplan.traces.reader import Trace
from tests.planner.makers import sized, write_profile


@pytest.fixture(scope="package", autouse=True)
def little_work() -> Iterator[None]:
    """Searches of exflow that end soon; none of these tests is about how good they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "ANNEALING_RATE", 1e6)
        yield


@pytest.fixture(scope="session")
def make_profile(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a profile of a cluster; parameters as of `write_profile`."""

    def make(cluster: str = "1x4", **settings: Any) -> Path:
        return write_profile(tmp_path_factory.mktemp("profile") / "profile.json", cluster, **settings)

    return make


@pytest.fixture(scope="session")
def make_trace(make_trace: Callable[..., Trace], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trace]:
    """The traces of all tests, with experts of a known size."""

    def make(ffn_size: int | None = 96, **settings: Any) -> Trace:
        return sized(make_trace(**settings), tmp_path_factory.mktemp("sized"), ffn_size=ffn_size)

    return make
