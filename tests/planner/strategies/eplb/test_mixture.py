"""Several traces with weights: planned for together, judged by weighted means."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.errors import CertificationError, MismatchError, UsageError
from moeplan.planner.certify import certify
from moeplan.planner.compare import compare
from moeplan.planner.options import PlacementOptions
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Plan, save
from moeplan.solvers import eplb
from moeplan.traces.split import fitted
from tests.planner.edits import edited
from tests.planner.makers import balances, held_out, tallied


def planned(*mixture: tuple[Any, float], **changes: Any) -> Plan:
    found = tuple((str(trace.path), weight) for trace, weight in mixture)
    settings: dict[str, Any] = {"strategy": "eplb", "cluster": Cluster.parse("1x4"), "redundant": 4}
    return solve(Request.of(trace=found[0][0], mixture=found, **settings | changes))


def test_loads_are_weighted_by_their_shares_and_so_is_what_judges(tmp_path: Path) -> None:
    (prefill, some), (decode, more) = (
        tallied(tmp_path / str(seed), seed=seed, steps=steps) for seed, steps in ((1, 30), (2, 44))
    )
    plan = planned((prefill, 3.0), (decode, 1.0))
    loads = np.zeros(some.shape[1:])
    for counts, weight in ((some, 0.75), (more, 0.25)):
        seen = counts[fitted(np.arange(len(counts)), seed=0, fraction=0.5)].sum(axis=0)
        loads += weight * seen / seen.sum(axis=1, keepdims=True)
    expected = eplb.solve(np.rint(loads * 2**40), plan.cluster, slots=5).placement
    assert plan.placement is not None
    np.testing.assert_array_equal(plan.placement.physical_to_logical, expected.physical_to_logical)
    assert plan.evaluation is not None
    assert plan.evaluation.held_out is not None
    ours = plan.evaluation.held_out.contenders[0].metrics["balance"]
    apart = [balances(plan, held_out(counts)).mean() for counts in (some, more)]
    assert ours.value == pytest.approx(0.75 * apart[0] + 0.25 * apart[1], rel=1e-12)
    assert ours.low is not None
    assert ours.low < ours.value < (ours.high or 0.0)
    assert plan.evaluation.held_out.num_steps == sum(len(held_out(counts)) for counts in (some, more))
    members = PlacementOptions.model_validate(plan.options["placement"]).mixture
    assert [(one.sha256, one.weight) for one in members] == [(prefill.sha256, 0.75), (decode.sha256, 0.25)]
    certificate = certify(plan, prefill.path)
    assert certificate.largest_difference < 1e-12
    assert {"metrics of every contender", "verdict", "objective"} <= {*certificate.checks}
    with pytest.raises(MismatchError, match="hash"):
        certify(plan, decode.path)
    for path, change in (
        ("evaluation.held_out.contenders.0.metrics.balance.value", lambda x: x + 1e-6),
        ("evaluation.held_out.contenders.1.metrics.balance.low", lambda x: x + 1e-6),
        ("evaluation.fit.num_steps", lambda x: x + 1),
        ("outcome.placement.objective.value", lambda x: x - 1e-6),
        ("outcome.placement.objective.name", "step_balance"),
        ("inputs.trace.num_tokens", lambda x: x + 1),
        ("options.placement.mixture.0.weight", 0.5),
        ("options.placement.mixture.1.weight", 0.5),
    ):
        with pytest.raises(CertificationError):
            certify(edited(plan, path, change), prefill.path)
    with pytest.raises(CertificationError, match="with the wrong parts"):
        certify(edited(plan, "evaluation.held_out", None))
    gone = edited(plan, "options.placement.mixture.1.path", "s3://elsewhere/t")
    assert "figures of a mixture, whose other traces are not here" in certify(gone, prefill.path).unchecked


def test_a_weight_alone_decides_as_the_trace_alone_and_redundancy_is_weighed_for_all(tmp_path: Path) -> None:
    traces = [tallied(tmp_path / str(seed), seed=seed)[0] for seed in (1, 2)]
    both = planned((traces[0], 1e-6), (traces[1], 1e6), method="published")
    alone = planned((traces[1], 1.0), method="published")
    assert both.decisions == alone.decisions
    found = PlacementOptions.model_validate(
        planned((traces[0], 1), (traces[1], 1), redundant="auto").options["placement"]
    )
    assert found.redundancy is not None
    assert len(found.redundancy.candidates) == 5


def test_units_of_any_of_its_traces_are_left_out_of_a_comparison(tmp_path: Path) -> None:
    traces = [tallied(tmp_path / str(seed), seed=seed)[0] for seed in (1, 2)]
    save(planned((traces[0], 1.0), (traces[1], 1.0)), tmp_path / "plan.json")
    for trace in traces:
        assert (
            compare([tmp_path / "plan.json"], trace.path).num_fitted
            == fitted(np.arange(40), seed=0, fraction=0.5).sum()
        )
    assert compare([tmp_path / "plan.json"], tallied(tmp_path / "new", seed=3)[0].path).num_fitted == 0


def test_tokens_and_their_phases_mix_too(make_trace: Any) -> None:
    one, other = make_trace(samples=40, seed=1), make_trace(samples=60, seed=2)
    plan = planned((one, 1.0), (other, 1.0))
    assert plan.evaluation is not None
    metrics = plan.evaluation.fit.contenders[0].metrics
    assert {"device_copies", "balance", "intra_bytes"} <= metrics.keys()
    assert certify(plan, one.path).largest_difference < 1e-12


def test_what_does_not_mix_is_one_clear_refusal(make_trace: Any, tmp_path: Path) -> None:
    counts, tokens = tallied(tmp_path / "t")[0], make_trace(samples=40)
    other = tallied(tmp_path / "u", keys=("sample",))[0]
    with pytest.raises(MismatchError, match="another model"):
        planned((counts, 1.0), (tokens, 1.0))
    with pytest.raises(UsageError, match="splits by sample"):
        planned((counts, 1.0), (other, 1.0))
    with pytest.raises(UsageError, match="--quantile with several --trace"):
        planned((counts, 1.0), (counts, 1.0), quantile=0.5)
