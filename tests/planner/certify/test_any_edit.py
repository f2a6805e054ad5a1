"""Any value of a plan that is edited, whatever it is, is refused, unless the certificate lists it as unchecked."""

import contextlib
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moeplan.planner.certify
from moeplan.errors import CertificationError, InputError, MismatchError
from moeplan.planner.certify import certify
from moeplan.profilers.profile import load
from tests.planner.makers import counted, edited, planned

ALLOWED = {"placement", "outcome", "__future__"}  # of solvers
CLAIMED = {"naive_split.py": {"quota", "cost"}}  # a split, which is proved there, and what its links cost
CONTAINERS = {"Counter", "SampleCounts", "SampleTraffic"}  # of what is counted, not how

# What informs, what the certificate lists as unchecked, and words that mean the same.
FREE = (
    "path", "sha256", "created_at", "moeplan_version", "wall_s", "compiled_s", "backend", "time_limit_s", "repaired",
    "objective_without", "highest_without", "status", "schema_version", "plan_sha256", "planning_s",
)  # fmt: skip
UNCHECKED = (
    ("options", "placement", "method"),
    ("options", "placement", "choice", "candidates"),
    ("options", "placement", "search", "bound"),
    ("options", "placement", "search", "simple"),
    ("options", "placement", "search", "stages"),
    ("options", "sample_policy", "asked"),
    ("options", "placement", "search", "cap"),
    ("cluster", "links"),
    # Where they change neither a figure nor what is best, another value says as much.
    ("options", "pipeline", "max_degree"),
    ("options", "pipeline", "joint"),
    ("options", "pipeline", "full_duplex"),
    ("inputs", "trace", "split", "fit_fraction"),
    ("options", "rebalancing", "tried"),
    *(("decisions", "rebalancing", name) for name in ("trigger", "window", "every", "evaluations")),
)


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every number and word of a plan that is to be held, with its path."""
    if isinstance(value, dict):
        for name, one in value.items():
            if name not in FREE and (*path, name) not in UNCHECKED:
                yield from leaves(one, (*path, name))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from leaves(one, (*path, str(number)))
    elif value is not None:
        yield path, value


def kind_of(path: tuple[str, ...]) -> str:
    """What values are alike: places of lists, the two parts of an evaluation, and all rules that were followed."""
    way = "/".join("#" if step.isdigit() or step == "held_out" else step for step in path).replace("/fit/", "/#/")
    return re.sub("followed/[^/]+", "followed/#", way)


def perturbed(value: Any, factor: float) -> Any:
    """Another value of the same kind, near."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + (1 if factor > 1 or value == 0 else -1)
    if isinstance(value, float):
        return value * factor if value else factor - 1
    return value[:-1] + ("a" if value[-1:] != "a" else "b") if value else "a"


def test_any_other_value_is_refused(make_trace: Any, make_profile: Any, tmp_path: Path) -> None:
    """Of plans of every strategy, with a profile where it tells something; a value of every kind."""
    rng, profile, to = random.Random(0), make_profile("2x2"), tmp_path / "plan.json"
    trace = make_trace(samples=24, tokens=12)
    run = make_trace(samples=24, tokens=12, columns=("step", "sample", "source_rank"), ranks=4)
    training = {"purpose": "training", "slots": 3, "horizon": 30.0}
    plans: list[dict[str, Any]] = [
        {"strategy": "exflow", "time_limit_s": 0.5},
        {"strategy": "exflow", "dispatch_model": "standard", "profile": profile, "time_limit_s": 0.5},
        {"strategy": "eplb", "redundant": 4},
        {"strategy": "eplb", "redundant": 4, "trace": counted(trace, tmp_path / "counts"), "method": "published"},
        {"strategy": "eplb", "redundant": 4, "concurrency": 32, "samples_per_step": None},
        {"strategy": "contiguous", "profile": profile, "tokens_per_step": 50, "samples_per_step": None},
        {"strategy": "pipemoe", "profile": profile, "max_degree": 4},
        {"strategy": "netmoe", "profile": profile},
        {"strategy": "flexmoe", "trace": run, "profile": profile, "samples_per_step": None} | training,
    ]
    values: dict[str, list[Any]] = {}
    for asked in plans:
        settings = {"trace": trace, "cluster": load(profile).cluster, "samples_per_step": 4} | asked
        plan = planned(to=to, **settings)
        for path, value in leaves(plan.model_dump(mode="json")):
            values.setdefault(kind_of(path), []).append((plan, settings, "/".join(path), value))
    assert len(values) > 150
    certified = []
    for alike, factor in itertools.product(values.values(), (1.001, 0.999)):
        plan, settings, at, value = rng.choice(alike)
        forged = at, perturbed(value, factor)
        with contextlib.suppress(CertificationError, InputError, MismatchError):
            certify(edited(plan, *forged), settings["trace"].path, settings.get("profile"), folder=tmp_path)
            certified.append(forged)
    assert certified == []


def test_certify_imports_nothing_of_the_solvers_but_placement_and_outcome() -> None:
    for file in Path(moeplan.planner.certify.__file__).parent.glob("*.py"):
        for line in file.read_text().splitlines():
            if line.lstrip().startswith("from ...solvers"):
                module, allowed = line.split()[1].removeprefix("...solvers").lstrip("."), CLAIMED.get(file.name, set())
                assert module in ALLOWED | allowed, f"{file.name}: {line}"
            if line.startswith("from ..evaluate"):
                module, names = line.removeprefix("from ..evaluate.").split(" import ")
                assert module != "replay", f"{file.name}: {line}"
                assert module != "traffic" or {*names.split(", ")} <= CONTAINERS, f"{file.name}: {line}"
