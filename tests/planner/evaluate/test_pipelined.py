"""The seconds of pipelined layers and of the steps they are in; rows under a fixed capacity, and what it drops."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.planner.evaluate.chunks import capacity
from moeplan.planner.evaluate.sums import dropped_share
from moeplan.planner.evaluate.tally import COUNTS, Ports, Tally
from moeplan.solvers.pipemoe import simulate
from tests.builders import model
from tests.planner.makers import judged, options, planned, said, seconds, training


def test_degree_1_takes_what_the_placement_takes_without_a_pipeline(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    trace, profile, on = make_trace(samples=40, tokens=60), make_profile("2x2"), tmp_path / "base.json"
    base = planned(trace, "eplb", profile=profile, redundant=4, to=on)
    plan = planned(trace, "pipemoe", profile=profile, on=on)
    for name in ("step_s", "dispatch_s", "dispatch_inter_s", "experts_s", "combine_s", "attention_s"):
        assert seconds(plan, "degree_1/standard", name) == pytest.approx(seconds(base, "plan/standard", name))


def test_a_step_is_attention_and_both_passes(make_trace: Any, make_profile: Any, tmp_path: Path) -> None:
    plan = planned(training(make_trace(samples=40), tmp_path), "pipemoe", profile=make_profile())
    parts = [seconds(plan, "plan/standard", name) for name in ("attention_s", "moe_s", "moe_backward_s")]
    assert seconds(plan, "plan/standard", "step_s") == pytest.approx(sum(parts))
    busy = [seconds(plan, "plan/standard", name) for name in ("dispatch_s", "experts_s", "combine_s")]
    assert max(busy[0] + busy[2], busy[1]) <= parts[1] <= sum(busy)
    assert (plan.verdict.metric, plan.verdict.against) == ("step_s", "contiguous/standard")


def test_where_experts_and_exchanges_are_long_alike_a_benefit_is_expected(make_trace: Any, make_profile: Any) -> None:
    trace, profile = make_trace(samples=300, tokens=300), make_profile(noise=0.01)
    assert planned(trace, "pipemoe", profile=profile, samples_per_step=32).verdict.value == "benefit"


@pytest.mark.parametrize("cluster", ["1x4", "2x2"])
def test_under_a_fixed_capacity_every_chunk_is_of_whole_padded_rows_whatever_is_routed_where(
    make_trace: Any, make_profile: Any, cluster: str
) -> None:
    """Rows of an expert from a device as Tutel counts them; all of them are sent and computed in every chunk."""
    trace, profile = make_trace(samples=16, tokens=75, layers=2), make_profile(cluster, noise=0.0)
    plan = planned(trace, "pipemoe", profile=profile, fit_fraction=1.0, max_degree=6, capacity_factor=1.3)
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

    forward, table = plan.decisions.pipeline.forward, [taken(degree) for degree in range(1, 7)]
    for degree in forward:
        assert table[degree - 1] == pytest.approx(min(table), rel=0.01)
    assert seconds(plan, "plan/standard", "moe_s") == pytest.approx(2 * min(table), rel=0.02)
    assert seconds(plan, "degree_1/standard", "moe_s") == pytest.approx(2 * table[0], rel=0.02)
    assert options(plan).a2a_ffn_overlap_degree == forward


@pytest.mark.parametrize(
    ("capacity_factor", "tokens", "rows"),
    [(1.0, 300, 76), (1.3, 300, 98), (1.37, 300, 104), (0.99, 16, 2), (2.5, 17, 14)],
)
def test_a_buffer_has_for_each_choice_the_whole_rows_of_the_factor_times_the_mean_rounded_up(
    capacity_factor: float, tokens: int, rows: int
) -> None:
    """The fullest of four devices has so many tokens, each to two of eight experts."""
    held, copies = np.array([[[tokens, tokens - 1, 1, 0]]]), np.zeros((1, 3, 1, 2, 4), np.int64)
    ports = Ports(copies, copies, held, held)
    tally = Tally(np.zeros((1, len(COUNTS)), np.int64), copies[:, :, 0, 0], np.full(4, 2), ports)
    assert capacity(tally, model(), capacity_factor).tolist() == [[rows] * 3]


def test_pairs_beyond_a_buffer_are_dropped_buffer_by_buffer() -> None:
    sent_BLDE = np.array([[[[5, 1], [0, 2]]], [[[1, 1], [1, 1]]]], np.int32)
    assert dropped_share(sent_BLDE, np.array([[2], [1]])) == 3 / 12
    assert dropped_share(sent_BLDE, np.array([[5], [1]])) == 0


def test_the_share_that_is_dropped_is_that_of_a_walk_over_all_tokens_and_the_verdict_names_it(
    make_trace: Any, make_profile: Any
) -> None:
    trace = make_trace(samples=16, tokens=30, layers=2)
    asked: dict[str, Any] = {"profile": make_profile(), "max_degree": 1, "capacity_factor": 1.1}
    plan = planned(trace, "pipemoe", fit_fraction=1.0, **asked)
    rows, wanted = 2 * int(1.1 * 15), Counter[tuple[int, int, int]]()  # 4 samples of 30 tokens on 8 experts
    (batch,) = trace.batches()
    home = {sample: place % 4 for place, sample in enumerate(np.unique(batch.sample).tolist())}
    for sample, ids_LK in zip(batch.sample.tolist(), batch.ids.tolist(), strict=True):
        wanted.update((layer, home[sample], one) for layer, ids_K in enumerate(ids_LK) for one in ids_K)
    beyond = sum(max(pairs - rows, 0) for pairs in wanted.values())
    assert beyond > 0
    assert seconds(plan, "plan/standard", "dropped_share") == pytest.approx(beyond / wanted.total())
    plan = planned(trace, "pipemoe", **asked)
    share = judged(plan)["plan/standard"]["dropped_share"]
    assert f"\n{share:.1%} of the token-expert pairs are dropped" in said(plan)
