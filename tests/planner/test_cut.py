"""Cuts into equal and into unequal chunks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.planner.cut import Cut
from tests.planner.pipelines import make_plan, seconds, training


def test_unequal_chunks_help_where_experts_take_long_and_never_take_longer_than_equal_ones(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    profile = make_profile("1x2", noise=0.0)
    for trains in (False, True):
        trace = make_trace(samples=32, tokens=400)
        trace = training(trace, tmp_path) if trains else trace
        plan, equal = (
            make_plan(trace, profile, method=method, fit_fraction=1.0, max_degree=8) for method in ("unequal", "exact")
        )
        decision = plan.decisions.pipeline
        assert decision is not None
        shares = decision.shares
        assert shares is not None
        assert [*map(len, shares.forward)] == [*decision.forward]
        assert (shares.backward is None) == (decision.backward is None) == (not trains)
        assert any(len(set(one)) > 1 for one in shares.forward)
        value = sum(seconds(plan, "plan/standard", name) for name in ["moe_s"] + ["moe_backward_s"] * trains)
        assert value == pytest.approx(plan.outcome["pipeline"].objective.value, rel=1e-12)
        assert value < 0.995 * equal.outcome["pipeline"].objective.value
        assert seconds(plan, "exact/standard", "moe_s") == seconds(equal, "plan/standard", "moe_s")
        assert plan.outcome["pipeline"].bound is None


def test_equal_shares_take_what_equal_degrees_take() -> None:
    rows = np.arange(1, 2000)[None, :, None] * np.ones((1, 1, 3), np.int64)
    for degree in (1, 2, 3, 7, 32, 49):
        equal = Cut.equal(degree, 1999).sizes(rows)[0]
        for part in Cut.of(((1 / degree,) * degree,) * 1999).sizes(rows):
            assert (part == equal).all()
