"""What a fixed capacity drops: counted token by token, certified, told."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from moeplan.errors import CertificationError
from moeplan.planner.certify import certify
from moeplan.planner.evaluate.sums import dropped_share
from moeplan.runtime.plan import Plan
from tests.planner.makers import edited, make_plan, part_of, said


def dropped(plan: Plan, number: int = 0) -> float:
    assert plan.evaluation is not None
    return plan.evaluation.fit.contenders[number].metrics["dropped_share"].value


def test_pairs_beyond_a_buffer_are_dropped_buffer_by_buffer() -> None:
    sent_BLDE = np.array([[[[5, 1], [0, 2]]], [[[1, 1], [1, 1]]]], np.int32)
    assert dropped_share(sent_BLDE, np.array([[2], [1]])) == 3 / 12
    assert dropped_share(sent_BLDE, np.array([[5], [1]])) == 0


def test_the_share_is_that_of_a_walk_over_all_tokens(make_trace: Any, make_profile: Any) -> None:
    trace = make_trace(samples=16, tokens=30, layers=2)
    plan = make_plan(trace, make_profile(), fit_fraction=1.0, max_degree=1, capacity_factor=1.1)
    rows, wanted = 2 * int(1.1 * 15), Counter[tuple[int, int, int]]()  # 4 samples of 30 tokens on 8 experts
    (batch,) = trace.batches()
    assert batch.sample is not None
    home = {sample: place % 4 for place, sample in enumerate(np.unique(batch.sample).tolist())}
    for sample, ids_LK in zip(batch.sample.tolist(), batch.ids.tolist(), strict=True):
        wanted.update((layer, home[sample], one) for layer, ids_K in enumerate(ids_LK) for one in ids_K)
    beyond = sum(max(pairs - rows, 0) for pairs in wanted.values())
    assert beyond > 0
    assert dropped(plan) == pytest.approx(beyond / wanted.total())


@pytest.mark.parametrize("method", ["exact", "unequal"])
def test_a_dropped_share_is_recounted_with_and_without_the_profile(
    make_trace: Any, make_profile: Any, method: str
) -> None:
    trace, profile = make_trace(samples=60, tokens=60, unrouted=0.05), make_profile("2x2")
    plan = make_plan(trace, profile, capacity_factor=0.9, max_degree=5, method=method)
    assert 0.05 < dropped(plan) < 0.5
    for given in (profile, None):
        certify(plan, trace.path, given)
        for change in (lambda x: x * 0.9, None):
            path = "evaluation/held_out/contenders/2/metrics/dropped_share" + ("/value" if change else "")
            with pytest.raises(CertificationError, match=r"degree_1/standard: (dropped_share|metrics)|values"):
                certify(edited(plan, path, change) if change else without(plan), trace.path, given)


def without(plan: Plan) -> Plan:
    def left(metrics: Any) -> Any:
        return {name: one for name, one in metrics.items() if name != "dropped_share"}

    return edited(plan, "evaluation/held_out/contenders/2/metrics", left)


def test_a_plan_without_a_capacity_may_not_claim_to_drop(make_trace: Any, make_profile: Any) -> None:
    trace, profile = make_trace(samples=40), make_profile()
    plan = edited(
        make_plan(trace, profile, max_degree=4),
        "evaluation/fit/contenders/0/metrics",
        lambda x: x | {"dropped_share": {"value": 0.0, "low": None, "high": None}},
    )
    with pytest.raises(CertificationError, match="metrics"):
        certify(plan, trace.path, profile)


def test_the_verdict_names_the_price(make_trace: Any, make_profile: Any) -> None:
    plan = make_plan(make_trace(samples=60, tokens=60), make_profile(), capacity_factor=0.9)
    share = part_of(plan).contenders[0].metrics["dropped_share"].value
    assert f"\n{share:.1%} of the token-expert pairs are dropped" in said(plan)
