"""Degrees by every method, against an event simulation walked in Python."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.profilers.cluster import Cluster
from moeplan.profilers.profile import load, save
from moeplan.solvers.pipemoe import simulate
from tests.planner.makers import options, planned, seconds, tokens, training


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("full_duplex", [False, True])
@pytest.mark.parametrize("slow", [False, True])
def test_the_degrees_are_those_of_a_search_by_simulation_under_the_formulas_behind_the_profile(
    make_trace: Any, make_profile: Any, tmp_path: Path, trains: bool, full_duplex: bool, slow: bool
) -> None:
    trace = make_trace(samples=16, tokens=200, layers=2)
    trace = training(trace, tmp_path) if trains else trace
    timed = ("expert_ffn", "attention", *(() if slow else ("all_to_all",)))
    profile, link = make_profile("1x2", noise=0.0, cases=timed), "intra=0.05:20"  # slow: longer than experts
    where = Cluster.parse("1x2", [link]) if slow else None
    asked: dict[str, Any] = {"fit_fraction": 1.0, "max_degree": 12, "full_duplex": full_duplex}
    plan = planned(trace, "pipemoe", where, profile=profile, **asked)
    work, s_per_byte = busiest(trace), 2e-8 if slow else 1e-9

    def mean(degree: int, pieces: int, *, back: bool) -> Any:
        return simulated(work, degree, pieces, 2.0 if back else 1.0, s_per_byte, full_duplex).mean(axis=0)

    decision = plan.decisions.pipeline
    assert (decision.backward is not None) == trains
    least = np.full(2, np.inf)
    for forward, backward in itertools.product(range(1, 13), range(1, 13) if trains else [1]):
        pieces = max(forward, backward)
        if pieces % min(forward, backward) == 0:
            taken = mean(forward, pieces, back=False) + (mean(backward, pieces, back=True) if trains else 0.0)
            least = np.minimum(least, taken)
    chosen = [*zip(decision.forward, decision.backward or (1, 1), strict=True)]
    for back, name in ((False, "moe_s"), (True, "moe_backward_s"))[: 1 + trains]:
        by_layer = [mean(pair[back], max(pair), back=back)[layer] for layer, pair in enumerate(chosen)]
        assert seconds(plan, "plan/standard", name) == pytest.approx(sum(by_layer), rel=0.02)
        assert seconds(plan, "degree_1/standard", name) == pytest.approx(mean(1, 1, back=back).sum(), rel=0.02)
    assert plan.outcome["pipeline"].objective.value == pytest.approx(least.sum(), rel=0.015)
    assert plan.outcome["pipeline"].status == "optimal"
    assert max(decision.forward) > 1
    if slow and not full_duplex:
        assert seconds(plan, "plan/standard", "moe_s") > seconds(plan, "plan/standard", "experts_s")


def busiest(trace: Any) -> list[list[tuple[int, int]]]:
    """Copies through the busiest port, pairs on the busiest device, by step and layer; sample i at home on i mod 2."""
    devices, step, home = tokens(trace) // 4, np.repeat(np.arange(16) // 8, 200), np.repeat(np.arange(16) % 2, 200)

    def cell(of: int, layer: int) -> tuple[int, int]:
        sent = [int(((step == of) & (home == d) & (devices[:, layer] != d).any(axis=1)).sum()) for d in (0, 1)]
        return max(sent), max(np.bincount(devices[step == of, layer].ravel()).tolist())

    return [[cell(of, layer) for layer in (0, 1)] for of in (0, 1)]


def simulated(
    work: list[list[tuple[int, int]]], degree: int, pieces: int, factor: float, s_per_byte: float, full_duplex: bool
) -> Any:
    """A chunk's experts are called once a piece."""

    def layer(copies: int, pairs: int) -> float:
        exchange = [20e-6 + s_per_byte * 128 * -(-copies // degree)] * degree
        call = factor * (40e-6 + 1e-10 * 3 * 64 * 96 * -(-pairs // pieces))
        experts = [pieces // degree * call] * degree
        return simulate(exchange, experts, exchange, full_duplex=full_duplex)[-1].end_s

    return np.array([[layer(*cell) for cell in step] for step in work])


def test_a_joint_plan_has_one_degree_for_both_passes(make_trace: Any, make_profile: Any, tmp_path: Path) -> None:
    trace, profile = training(make_trace(samples=40, tokens=200), tmp_path), make_profile()
    apart, joint = (planned(trace, "pipemoe", profile=profile, joint=one) for one in (False, True))
    decision = joint.decisions.pipeline
    assert decision.forward == decision.backward == options(joint).a2a_ffn_overlap_degree
    assert options(apart).a2a_ffn_overlap_degree == decision.forward
    assert joint.outcome["pipeline"].objective.value >= apart.outcome["pipeline"].objective.value
    assert joint.outcome["pipeline"].status == "optimal"


def test_tutel_never_gets_more_chunks_than_it_takes(make_trace: Any, make_profile: Any) -> None:
    trace, profile = make_trace(samples=16, tokens=400, layers=1), make_profile("1x2")
    free = load(profile)
    nothing = {
        key: series.model_copy(update={"fit": replace(fit, model=replace(fit.alpha_beta, a_s=0.0), least_s=None)})
        for key, series in free.series.items()
        if (fit := series.fit) is not None
    }
    path = profile.with_name("free.json")
    save(free.model_copy(update={"series": nothing}), path)
    plan = planned(trace, "pipemoe", profile=path, max_degree=64)
    assert max(plan.decisions.pipeline.forward) > 32
    assert max(options(plan).a2a_ffn_overlap_degree) <= 32
