"""What is said of plans whose tokens return home: which copies judge them, who saves those, what balance costs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.errors import CertificationError
from moeplan.planner.certify import certify
from moeplan.planner.reports.remarks import remarks
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Plan
from moeplan.traces.reader import open_trace
from moeplan.traces.schema import TraceMeta
from moeplan.traces.writer import TraceWriter
from tests.planner.edits import edited
from tests.planner.profiles import SIZES


def renamed(trace: Any, names: list[int], folder: Path) -> Any:
    """A trace whose expert e is called `names[e]`."""
    with TraceWriter(folder, TraceMeta(form="tokens", model=trace.model, recorder="test")) as writer:
        for batch in trace.batches():
            writer.append(replace(batch, ids=np.array(names, np.uint16)[batch.ids]))
    return open_trace(folder)


@pytest.fixture(scope="module")
def trace(make_trace: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tokens that choose experts of both nodes of contiguous."""
    return renamed(make_trace(samples=80), [0, 4, 1, 5, 2, 6, 3, 7], tmp_path_factory.mktemp("mixed") / "trace")


def planned(trace: Any, cluster: str, links: tuple[str, ...] = (), **changes: Any) -> Plan:
    settings: dict[str, Any] = {"strategy": "exflow", "dispatch_model": "standard", "trace": str(trace.path)}
    return solve(Request(cluster=Cluster.parse(cluster, links), **settings | changes))


def said(plan: Plan) -> str:
    assert plan.evaluation is not None
    assert plan.evaluation.held_out is not None
    return "\n".join(remarks(plan, plan.evaluation.held_out))


def test_over_several_nodes_tokens_that_return_home_are_judged_by_copies_to_nodes(trace: Any) -> None:
    plan = planned(trace, "2x2")
    assert plan.verdict is not None
    assert plan.evaluation is not None
    assert plan.evaluation.held_out is not None
    of = {one.label: one.metrics for one in plan.evaluation.held_out.contenders}
    ours, base = of["plan/standard"], of["contiguous/standard"]
    assert plan.verdict.metric == "node_copies"
    assert plan.verdict.gain.value == base["node_copies"].value - ours["node_copies"].value
    words = said(plan)
    assert "fewer copies to nodes than contiguous, standard" in words
    assert "engines that send a token once a node (DeepEP) save this" in words
    sends = f"{ours['device_copies'].value:.2f} a token and layer (contiguous {base['device_copies'].value:.2f})"
    assert f"save this; moeplan.runtime sends a copy to each device: {sends}" in words
    assert "verdict" in certify(plan, trace.path).checks
    with pytest.raises(CertificationError, match="is judged on node_copies here"):
        certify(edited(plan, "verdict.metric", "device_copies"), trace.path)


def test_one_expert_a_device_saves_copies_to_nodes_where_copies_to_devices_cannot_change(trace: Any) -> None:
    plan = planned(trace, "2x4")
    assert plan.verdict is not None
    assert (plan.verdict.metric, plan.verdict.value) == ("node_copies", "benefit")


@pytest.mark.parametrize(("cluster", "changes"), [("1x4", {}), ("2x2", {"dispatch_model": "coherent"})])
def test_on_one_node_and_where_tokens_stay_copies_to_devices_judge(
    trace: Any, cluster: str, changes: dict[str, Any]
) -> None:
    plan = planned(trace, cluster, **changes)
    assert plan.verdict is not None
    assert plan.verdict.metric == "device_copies"
    assert "DeepEP" not in said(plan)


def test_with_seconds_those_judge_and_copies_to_nodes_are_told_beside(trace: Any, make_profile: Any) -> None:
    plan = planned(trace, "2x2", profile=make_profile("2x2"))
    assert plan.verdict is not None
    assert plan.verdict.metric == "step_s"
    assert "an engine that sends a token once a node (DeepEP) makes" in said(plan)


@pytest.mark.parametrize(
    ("dispatch_model", "cases", "longer", "words"),
    [
        ("standard", ("all_to_all",), "much", "BUT dispatch, combine take 250 ms a step, against"),
        ("coherent", ("all_to_all",), "much", "BUT dispatch, combine take 250 ms a step, against"),
        ("coherent", ("all_to_all", "all_gather"), "much", "BUT dispatch, combine, K and V take 2"),
        ("standard", ("all_to_all",), "less", ""),
        ("standard", ("all_to_all",), "little", ""),
        ("standard", tuple(SIZES), "much", ""),
    ],
)
def test_fewer_copies_whose_exchanges_are_known_to_take_longer_are_told_so(
    trace: Any, make_profile: Any, dispatch_model: str, cases: tuple[str, ...], longer: str, words: str
) -> None:
    plan = planned(trace, "1x4", profile=make_profile("1x4", cases=cases), dispatch_model=dispatch_model)
    assert plan.evaluation is not None
    assert plan.evaluation.held_out is not None
    of = {one.label: one.metrics for one in plan.evaluation.held_out.contenders}
    for name in ("dispatch_s", "combine_s"):
        base = of["contiguous/standard"][name].value
        changed = {"much": 0.125, "little": 1.005 * base, "less": 0.9 * base}[longer]
        plan = edited(plan, f"evaluation.held_out.contenders.0.metrics.{name}.value", changed)
    assert words in said(plan)
    assert bool(words) == ("BUT" in said(plan))


def test_what_balance_costs_stands_with_the_flag_that_caps_it(make_trace: Any, tmp_path: Path) -> None:
    uneven = renamed(make_trace(samples=80, top_k=1), [0, 0, 0, 3, 4, 5, 6, 7], tmp_path / "uneven")
    options: dict[str, Any] = {"dispatch_model": "coherent", "samples_per_step": 40}
    loose, capped = (planned(uneven, "1x2", max_load=cap, **options) for cap in (None, 1.2))
    assert "costs balance: the busiest device carries" in said(loose)
    assert "; --max-load caps that over all fitted samples, single steps vary more" in said(loose)
    assert "--max-load caps that over all fitted samples, 1.2 now, single steps vary more" in said(capped)
