"""What counts as a benefit, what a screen says of it, and that a fit's objective is what the evaluator counts."""

from collections.abc import Callable
from typing import Any

import pytest

from moeplan.errors import CertificationError
from moeplan.planner.certify import certify
from moeplan.planner.request import Request
from moeplan.planner.solve import make
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Verdict
from moeplan.solvers.cost import inter_ratio
from moeplan.traces.reader import Trace
from tests.planner.makers import edited, solved

MakeTrace = Callable[..., Trace]


def test_a_verdict_of_an_older_plan_pays_from_any_gain_on() -> None:
    found = Verdict.model_validate(
        {"value": "benefit", "metric": "hop_cost", "against": "contiguous/standard", "gain": {"value": 1.0}}
    )
    assert found.at_least == 0


def test_other_strategies_pay_from_any_gain_on(make_trace: MakeTrace) -> None:
    request = Request.of(strategy="exflow", trace=make_trace().path, cluster=Cluster.parse("1x2"))
    plan = make(request).plan
    assert plan.verdict is not None
    assert plan.verdict.at_least == 0
    with pytest.raises(CertificationError, match=r"from 0\.5 on; expected .* from 0\.0 on"):
        certify(edited(plan, "verdict.at_least", 0.5))


@pytest.mark.parametrize("cluster", ["2x2", "1x4", "4x1"])
def test_the_objective_of_a_sample_policy_is_what_its_combines_carry(make_trace: MakeTrace, cluster: str) -> None:
    """Method paper looks at this layer's combine alone; contenders in tokens and layers, both exchanges."""
    where = Cluster.parse(cluster)
    trace = make_trace(samples=64, tokens=6, layers=1)
    plan = solved(trace, cluster, method="paper", fit_fraction=1.0).plan
    assert plan.evaluation is not None
    part = plan.evaluation.fit
    ours, still = (one.metrics for one in part.contenders if one.label in ("plan/migrating", "contiguous/standard"))
    tokens = part.num_tokens / part.num_steps

    def link_cost(metrics: Any) -> float:
        far = metrics["inter_bytes"].value / 128 if where.num_nodes > 1 else 0.0
        return float(metrics["device_copies"].value * tokens + (inter_ratio(where) - 1) * far)

    dispatched = link_cost(still) / 2  # of the only layer, from where samples start
    assert plan.outcome["sample_policy"].objective.value == pytest.approx(link_cost(ours) - dispatched, rel=1e-12)


@pytest.mark.parametrize("cluster", ["1x2", "1x4"])
def test_the_hops_that_a_fit_keeps_are_those_the_evaluator_counts(make_trace: MakeTrace, cluster: str) -> None:
    request = Request.of(strategy="exflow", trace=make_trace(samples=40).path, cluster=Cluster.parse(cluster))
    plan = make(request).plan
    assert plan.evaluation is not None
    kept = plan.evaluation.fit.contenders[0].metrics["hops_kept"].value
    assert plan.outcome["placement"].objective.value == pytest.approx(kept, rel=1e-12)
