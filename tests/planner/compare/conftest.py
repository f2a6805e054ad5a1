"""Plans of every kind for one trace, each made once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moeplan.planner.request import Request
from moeplan.planner.solve import make
from moeplan.profilers.cluster import Cluster
from moeplan.traces.reader import Trace

MakeTrace = Callable[..., Trace]
Planned = Callable[..., Path]


@pytest.fixture(scope="package")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """Solve a trace for 2x2, by exflow unless told, and keep the plan in a folder of its own."""

    def plan(trace: Trace, name: str = "plan.json", **changes: Any) -> Path:
        path = tmp_path_factory.mktemp("plans") / name
        settings: dict[str, Any] = {"strategy": "exflow", "trace": str(trace.path), "cluster": Cluster.parse("2x2")}
        make(Request.of(**settings | changes)).save(path)
        return path

    return plan


@pytest.fixture(scope="package")
def trace(make_trace: MakeTrace) -> Trace:
    """A trace of four steps a part on 2x2."""
    return make_trace(samples=130, tokens=12)


@pytest.fixture(scope="package")
def new(make_trace: MakeTrace) -> Trace:
    """Another trace of the model, of whole steps alone."""
    return make_trace(samples=96, tokens=10, seed=4)


@pytest.fixture(scope="package")
def profile(make_profile: Callable[..., Path]) -> Path:
    """What times 2x2."""
    return make_profile("2x2")


@pytest.fixture(scope="package")
def shelf(trace: Trace, profile: Path, planned: Planned) -> Callable[[str], Path]:
    """The plan of a name, made when it is first asked for; timed ones have `_s` in it."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {  # what it stands on, and what it is asked for
        "coherent": ("", {"objective": "copies"}),
        "coherent_s": ("", {"objective": "copies", "profile": profile}),
        "standard": ("", {"dispatch_model": "standard"}),
        "replicated": ("", {"strategy": "eplb", "redundant": 4}),
        "even": ("", {"strategy": "eplb"}),
        "even_s": ("", {"strategy": "eplb", "profile": profile}),
        "dead": ("", {"strategy": "eplb", "dead": (3,), "redundant": 4}),
        "contiguous": ("", {"strategy": "contiguous"}),
        "piped_s": ("even_s", {"strategy": "pipemoe", "profile": profile}),
        "capped_s": ("", {"strategy": "pipemoe", "profile": profile, "capacity_factor": 1.0}),
        "roomy_s": ("", {"strategy": "pipemoe", "profile": profile, "capacity_factor": 4.0}),
        "moving": ("", {"strategy": "netmoe"}),
        "moving_on": ("even", {"strategy": "netmoe"}),
        "moving_on_s": ("even_s", {"strategy": "netmoe", "profile": profile}),
        "moving_piped_s": ("piped_s", {"strategy": "netmoe", "profile": profile}),
    }

    @cache
    def plan(name: str) -> Path:
        base, changes = kinds[name]
        return planned(trace, f"{name}.json", **changes, **({"on": plan(base)} if base else {}))

    return plan
