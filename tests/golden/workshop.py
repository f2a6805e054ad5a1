"""The workshop: where traces, profiles, plans and comparisons of the cases are made, each when first asked for."""

import json
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from moeplan.planner.certify import Certificate, certify
from moeplan.planner.compare import Comparison, compare
from moeplan.planner.report.compare import as_dict
from moeplan.planner.request import Request, cluster_for
from moeplan.planner.solve import Solved, make
from moeplan.runtime.plan import Plan
from moeplan.solvers.exflow import strategy
from tests.golden.cases import COMPARES, SOLVES, TRACES
from tests.golden.routing import write_trace
from tests.planner.makers import write_profile

WORK_A_SECOND = 3e6  # of exflow's annealing, which then ends by work, long before its time
PROFILE = Path("profile.json")
Record = dict[str, Any]


class Workshop:
    """The working directory that cases are made in; paths are relative, so that no record says where it was."""

    def __init__(self) -> None:
        self._made: dict[str, Solved] = {}
        self._records: dict[str, Record] = {}

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator["Workshop"]:
        """A workshop in an empty folder, the working directory until it is left."""
        with chdir(folder), patch.object(strategy, "ANNEALING_RATE", WORK_A_SECOND):
            yield cls()

    def record(self, case: str) -> Record:
        """What a case gives, by section, as JSON with floats of 12 digits."""
        if case not in self._records:
            record = _of_plan(self._plan(case)) if case in SOLVES else self._compared(case)
            self._records[case] = json.loads(json.dumps(record), parse_float=lambda text: float(f"{float(text):.12g}"))
        return self._records[case]

    def plan(self, case: str) -> Plan:
        """The plan of a case."""
        return self._plan(case).plan

    def request(self, case: str) -> Request:
        """What a case is solved for."""
        return self._request(**SOLVES[case])

    def comparison(self, case: str) -> Comparison:
        """The comparison of a case."""
        settings = dict(COMPARES[case])
        plans, trace = settings.pop("plans"), trace_of(settings.pop("trace"))
        return compare([self._saved(name) for name in plans], trace, **settings | {"profile": _profile(settings)})

    def certified(self, case: str) -> Certificate:
        """The certificate of a case's plan, with all its files."""
        made = self._plan(case)
        profile = _profile(SOLVES[case]) if made.plan.inputs.profile else None
        return certify(made.plan, trace_of(SOLVES[case]["trace"]), profile, folder=".")

    def _plan(self, case: str) -> Solved:
        if case not in self._made:
            self._made[case] = make(self._request(**SOLVES[case]))
            self._made[case].save(f"{case}.json")
        return self._made[case]

    def _saved(self, case: str) -> Path:
        """The file of a case's plan."""
        self._plan(case)
        return Path(f"{case}.json")

    def _request(self, **settings: Any) -> Request:
        profile, trace = _profile(settings), trace_of(settings["trace"])
        settings |= {name: self._saved(settings[name]) for name in ("on", "previous") if name in settings}
        base, links = settings.get("on") or settings.get("previous"), settings.pop("links", ())
        cluster = cluster_for(settings.get("cluster", "2x2"), profile, links, on=base)
        if not settings.keys() & {"samples_per_step", "tokens_per_step", "concurrency", "purpose"}:
            settings["samples_per_step"] = 4 * cluster.num_devices
        mixture = tuple((trace_of(name), weight) for name, weight in settings.get("mixture", {}).items())
        return Request.of(**settings | {"trace": trace, "mixture": mixture, "profile": profile, "cluster": cluster})

    def _compared(self, case: str) -> Record:
        """The sections of a comparison."""
        record = as_dict(self.comparison(case))
        del record["trace"]
        return {
            "evaluation": {"part": _of_part(record.pop("part")), "copies_between": record.pop("copies_between")},
            "verdict": {name: record.pop(name) for name in ("plans", "no_longer_pay")},
            "options": record,
        }


def _of_plan(made: Solved) -> Record:
    """The sections of a plan."""
    plan = made.plan.model_dump(mode="json")
    for outcome in plan["outcome"].values():
        del outcome["wall_s"], outcome["compiled_s"]
    for member in plan["options"].get("placement", {}).get("mixture", ()):
        del member["sha256"]  # of a Parquet file, which names the version that wrote it
    for rule in plan["options"].get("rebalancing", {}).get("followed", {}).values():
        del rule["planning_s"]
    told = {"dispatch_model": made.plan.dispatch_model, "sidecars": sorted(made.sidecars)}
    return {
        # Without the plan's hash, which tells the last bits of floats that CPUs round unlike
        "decisions": told | {name: plan[name] for name in ("strategies", "decisions")},
        "evaluation": {name: part and _of_part(part) for name, part in plan["evaluation"].items()},
        **{name: plan[name] for name in ("outcome", "options", "verdict")},
    }


def _of_part(part: Record) -> Record:
    """A part whose contenders go by their labels, metrics as value, low and high."""
    by_label = {
        f"{one['name']}/{one['dispatch_model']}": {name: [*metric.values()] for name, metric in one["metrics"].items()}
        for one in part["contenders"]
    }
    return part | {"contenders": by_label}


def trace_of(name: str) -> str:
    """The folder of a trace."""
    if not Path(name).exists():
        write_trace(Path(name), **TRACES[name])
    return name


def shared_profile() -> Path:
    """The profile of 2x2 that cases share."""
    return PROFILE if PROFILE.exists() else write_profile(PROFILE, "2x2")


def _profile(settings: Record) -> Path | None:
    """The profile, where a case has one; pipemoe always has."""
    return shared_profile() if settings.get("profile") or settings.get("strategy") == "pipemoe" else None
