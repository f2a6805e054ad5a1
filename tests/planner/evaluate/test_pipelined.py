"""The seconds of pipelined layers and of the steps they are in, and rows under a fixed capacity."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.planner.evaluate.chunks import capacity
from moeplan.planner.evaluate.tally import COUNTS, Ports, Tally
from moeplan.solvers.pipemoe import simulate
from moeplan.traces.model import ModelSpec
from tests.planner.makers import make_plan, options, placed, seconds, training


def test_the_fit_objective_is_what_the_evaluator_gives(make_trace: Any, make_profile: Any, tmp_path: Path) -> None:
    trace = training(make_trace(samples=40, tokens=60), tmp_path)
    for method in ("exact", "paper", "robust"):
        plan = make_plan(trace, make_profile("2x2"), method=method)
        found = sum(seconds(plan, "plan/standard", name) for name in ("moe_s", "moe_backward_s"))
        assert found == pytest.approx(plan.outcome["pipeline"].objective.value, rel=1e-12)


def test_degree_1_takes_what_the_placement_takes_without_a_pipeline(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    trace, profile = make_trace(samples=40, tokens=60), make_profile("2x2")
    on = placed(trace, profile, tmp_path / "base.json", redundant=4)
    plan, base = make_plan(trace, profile, on=on), make_plan(trace, profile, strategy="eplb", redundant=4)
    for name in ("step_s", "dispatch_s", "dispatch_inter_s", "experts_s", "combine_s", "attention_s"):
        assert seconds(plan, "degree_1/standard", name) == pytest.approx(seconds(base, "plan/standard", name))


def test_a_step_is_attention_and_both_passes(make_trace: Any, make_profile: Any, tmp_path: Path) -> None:
    plan = make_plan(training(make_trace(samples=40), tmp_path), make_profile())
    parts = [seconds(plan, "plan/standard", name) for name in ("attention_s", "moe_s", "moe_backward_s")]
    assert seconds(plan, "plan/standard", "step_s") == pytest.approx(sum(parts))
    busy = [seconds(plan, "plan/standard", name) for name in ("dispatch_s", "experts_s", "combine_s")]
    assert max(busy[0] + busy[2], busy[1]) <= parts[1] <= sum(busy)
    assert plan.verdict is not None
    assert (plan.verdict.metric, plan.verdict.against) == ("step_s", "contiguous/standard")


def test_where_experts_and_exchanges_are_long_alike_a_benefit_is_expected(make_trace: Any, make_profile: Any) -> None:
    plan = make_plan(make_trace(samples=300, tokens=300), make_profile(noise=0.01), samples_per_step=32)
    assert plan.verdict is not None
    assert plan.verdict.value == "benefit"


@pytest.mark.parametrize("cluster", ["1x4", "2x2"])
def test_under_a_fixed_capacity_every_chunk_is_of_whole_padded_rows_whatever_is_routed_where(
    make_trace: Any, make_profile: Any, cluster: str
) -> None:
    """Rows of an expert from a device as Tutel counts them; all of them are sent and computed in every chunk."""
    trace, profile = make_trace(samples=16, tokens=75, layers=2), make_profile(cluster, noise=0.0)
    plan = make_plan(trace, profile, fit_fraction=1.0, max_degree=6, capacity_factor=1.3)
    group = int(cluster[2])
    rows = 2 * int(1.3 * -(-(4 * 75) // 8))  # top-2, 4 samples a device, 8 experts

    def taken(degree: int) -> float:
        chunk = -(-rows // degree)
        exchange = max(
            (20e-6 + 1e-9 * scale * 128 * 2 * peers * chunk)
            for peers, scale in ((group - 1, 1), (4 - group, 6))  # slower by 4, for 3 of 4 parts where 2 cross
            if peers
        )
        experts = 40e-6 + 1e-10 * 3 * 64 * 96 * 2 * 4 * chunk
        return simulate([exchange] * degree, [experts] * degree, [exchange] * degree)[-1].end_s

    found, table = plan.decisions.pipeline, [taken(degree) for degree in range(1, 7)]
    assert found is not None
    for degree in found.forward:
        assert table[degree - 1] == pytest.approx(min(table), rel=0.01)
    assert seconds(plan, "plan/standard", "moe_s") == pytest.approx(2 * min(table), rel=0.02)
    assert seconds(plan, "degree_1/standard", "moe_s") == pytest.approx(2 * table[0], rel=0.02)
    assert options(plan).a2a_ffn_overlap_degree == found.forward


def rows_of(capacity_factor: float, tokens: int) -> Any:
    """Rows of an expert where the fullest of four devices has so many tokens, each to two of eight experts."""
    model = ModelSpec(name="small", layer_ids=(0, 1, 2), num_experts=8, top_k=2)
    held = np.array([[[tokens, tokens - 1, 1, 0]]])
    copies = np.zeros((1, 3, 1, 2, 4), np.int64)
    tally = Tally(
        np.zeros((1, len(COUNTS)), np.int64), copies[:, :, 0, 0], np.full(4, 2), Ports(copies, copies, held, held)
    )
    return capacity(tally, model, capacity_factor).tolist()


@pytest.mark.parametrize(
    ("capacity_factor", "tokens", "rows"),
    [(1.0, 300, 76), (1.3, 300, 98), (1.37, 300, 104), (0.99, 16, 2), (2.5, 17, 14)],
)
def test_a_buffer_has_for_each_choice_the_whole_rows_of_the_factor_times_the_mean_rounded_up(
    capacity_factor: float, tokens: int, rows: int
) -> None:
    assert rows_of(capacity_factor, tokens) == [[rows] * 3]
