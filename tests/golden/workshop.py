"""The workshop: where traces, profiles, plans and comparisons of the cases are made, each when first asked for."""

import json
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from moeplan.planner.certify import Certificate, certify
from moeplan.planner.compare.comparison import compare
from moeplan.planner.compare.report import as_dict
from moeplan.planner.inputs import cluster_for
from moeplan.planner.request import Request
from moeplan.planner.solve import Made, make
from moeplan.solvers.exflow import strategy
from tests.golden.cases import COMPARES, SOLVES, TRACES
from tests.golden.routing import write_trace
from tests.planner.profiles import write_profile

__all__ = ["Workshop"]

WORK_A_SECOND = 3e6  # of exflow's annealing, which then ends by work, long before its time


class Workshop:
    """A working directory; paths in it are relative, so that no file of it says where it was."""

    def __init__(self) -> None:
        self._made: dict[str, Made] = {}
        self._records: dict[str, dict[str, Any]] = {}

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator["Workshop"]:
        """A workshop in an empty folder, the working directory until it is left."""
        with chdir(folder), patch.object(strategy, "ANNEALING_RATE", WORK_A_SECOND):
            yield cls()

    def record(self, case: str) -> dict[str, Any]:
        """What a case gives, by section, as JSON."""
        if case not in self._records:
            record = _of_plan(self._plan(case)) if case in SOLVES else self._compared(**COMPARES[case])
            self._records[case] = _rounded(record)
        return self._records[case]

    def certified(self, case: str) -> Certificate:
        """The certificate of a case's plan, all its files at hand."""
        settings, plan = SOLVES[case], self._plan(case).plan
        profile = _profile(settings) if plan.inputs.profile else None
        return certify(plan, _trace(settings["trace"]), profile, folder=".")

    def _plan(self, case: str) -> Made:
        if case not in self._made:
            self._made[case] = make(self._request(**SOLVES[case]))
            self._made[case].save(f"{case}.json")
        return self._made[case]

    def _saved(self, case: str) -> Path:
        """The file of a case's plan."""
        self._plan(case)
        return Path(f"{case}.json")

    def _request(self, **settings: Any) -> Request:
        profile = _profile(settings)
        settings |= {name: self._saved(settings[name]) for name in ("on", "previous") if name in settings}
        base, links = settings.get("on") or settings.get("previous"), settings.pop("links", ())
        cluster = cluster_for(settings.get("cluster", "2x2"), profile, links, on=base)
        mixture = tuple((_trace(name), weight) for name, weight in settings.get("mixture", {}).items())
        trace = _trace(settings["trace"])
        return Request(**settings | {"trace": trace, "mixture": mixture, "profile": profile, "cluster": cluster})

    def _compared(self, plans: tuple[str, ...], trace: str, **settings: Any) -> dict[str, Any]:
        paths, settings = [self._saved(name) for name in plans], settings | {"profile": _profile(settings)}
        record = as_dict(compare(paths, _trace(trace), **settings))
        verdicts = {name: record.pop(name) for name in ("plans", "no_longer_pay")}
        evaluation = {"part": _of_part(record.pop("part")), "copies_between": record.pop("copies_between")}
        del record["trace"]
        return {"evaluation": evaluation, "options": record, "verdict": verdicts}


def _of_plan(made: Made) -> dict[str, Any]:
    """The sections of a plan."""
    plan = made.plan.model_dump(mode="json")
    for outcome in plan["outcome"].values():
        del outcome["wall_s"], outcome["compiled_s"]
    for member in plan["options"].get("placement", {}).get("mixture", ()):
        del member["sha256"]  # of Parquet, which says who wrote it
    return {
        "decisions": {
            "plan_sha256": plan["plan_sha256"],
            "strategies": plan["strategies"],
            "dispatch_model": made.plan.dispatch_model,
            "sidecars": sorted(made.sidecars),
            "decisions": plan["decisions"],
        },
        "outcome": plan["outcome"],
        "evaluation": {name: part and _of_part(part) for name, part in plan["evaluation"].items()},
        "options": plan["options"],
        "verdict": plan["verdict"],
    }


def _of_part(part: dict[str, Any]) -> dict[str, Any]:
    """A part whose contenders go by their labels, metrics as value, low and high."""
    by_label = {
        f"{one['name']}/{one['dispatch_model']}": {
            name: [metric[figure] for figure in ("value", "low", "high")] for name, metric in one["metrics"].items()
        }
        for one in part["contenders"]
    }
    return part | {"contenders": by_label}


def _trace(name: str) -> str:
    path = Path("traces", name)
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_trace(path, **TRACES[name])
    return str(path)


def _profile(settings: dict[str, Any]) -> Path | None:
    """The profile of a case's cluster, where it has one; pipemoe always has."""
    if not (settings.get("profile") or settings.get("strategy") == "pipemoe"):
        return None
    cluster = settings.get("cluster", "2x2")
    path = Path(f"profile-{cluster}.json")
    return path if path.exists() else write_profile(path, cluster)


def _rounded(value: Any) -> Any:
    """JSON with floats of 12 digits."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.12g}"))
