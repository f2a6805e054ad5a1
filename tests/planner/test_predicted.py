"""Predicted seconds against formulas: profiles whose curves are known, and tokens walked by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.planner.options import SecondsOptions
from moeplan.planner.predicted import predicted
from moeplan.planner.replay import replay
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.planner.speeds import Speeds
from moeplan.planner.survey import survey
from moeplan.planner.tally import Route, Tally
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.profile import load
from moeplan.runtime.plan import Contender, Plan
from moeplan.solvers.placement import Placement

HALVES = Placement.from_sets([[[0, 1, 2, 3], [4, 5, 6, 7]]] * 3, 8)


def request(trace: Any, profile: Path | None, **changes: Any) -> Request:
    cluster = Cluster.parse("1x4") if profile is None else load(profile).cluster
    settings: dict[str, Any] = {"strategy": "exflow", "trace": str(trace.path), "cluster": cluster, "profile": profile}
    return Request(**settings | changes)


def held_out(plan: Plan) -> dict[str, Contender]:
    assert plan.evaluation is not None
    assert plan.evaluation.held_out is not None
    return {contender.label: contender for contender in plan.evaluation.held_out.contenders}


def tallied(trace: Any, cluster: Cluster, dispatch: Any) -> Tally:
    found = survey(trace)
    everyone = found.cohort(np.ones(len(found.unit_ids), bool), num_devices=cluster.num_devices, samples_per_step=4)
    return replay(trace, [everyone], [Route("plan", dispatch, HALVES)], cluster, ports=True)[0][0]


@pytest.mark.parametrize("dispatch", ["standard", "coherent"])
def test_a_step_is_what_the_formulas_behind_the_profile_give(make_trace: Any, make_profile: Any, dispatch: str) -> None:
    """Two devices, samples of 10 tokens at home on their ordinal mod 2; every token walked in Python."""
    trace, cluster = make_trace(samples=8), Cluster.parse("1x2")
    profile = load(make_profile("1x2", noise=0.0))
    speeds = Speeds.of(profile, cluster, trace.model, samples=True)
    assert speeds is not None
    found = predicted(tallied(trace, cluster, dispatch), speeds, cluster, trace.model, dispatch).seconds  # type: ignore[arg-type]
    expected = naive(np.concatenate([batch.ids for batch in trace.batches()]), dispatch)
    assert expected.keys() <= found.keys()
    for name, seconds in expected.items():
        np.testing.assert_allclose(found[name].seconds, seconds, rtol=0.03, err_msg=name)
    assert ("kv_s" in found) == (dispatch == "coherent")
    parts = [found[name].seconds for name in expected]
    np.testing.assert_allclose(found["step_s"].seconds, sum(parts))


def naive(ids: Any, dispatch: str) -> dict[str, Any]:
    """Seconds of the parts by step from the formulas of the fixture."""
    names = ("attention_s", "dispatch_s", "experts_s", "combine_s", *(["kv_s"] if dispatch == "coherent" else []))
    seconds = {name: np.zeros(2) for name in names}
    here = np.repeat(np.arange(8) % 2, 10)
    position, step_of = np.tile(np.arange(10), 8), np.repeat(np.arange(8) // 4, 10)
    for layer in range(3):
        devices = ids[:, layer] // 4
        after = devices[:, 0] if dispatch == "coherent" else here
        for step in (0, 1):
            rows = step_of == step
            held = [rows & (here == d) for d in (0, 1)]
            counts = [(held[d].sum(), (2 * position[held[d]] + 1).sum()) for d in (0, 1)]
            seconds["attention_s"][step] += max(attention(int(n), int(c)) for n, c in counts)
            out = [int((held[d] & (devices == 1 - d).any(axis=1)).sum()) for d in (0, 1)]
            back = [int((rows & (after == d) & (devices == 1 - d).any(axis=1)).sum()) for d in (0, 1)]
            seconds["dispatch_s"][step] += 20e-6 + 1e-9 * 128 * max(out)
            seconds["combine_s"][step] += 20e-6 + 1e-9 * 128 * max(back)
            pairs = max(int((devices[rows] == d).sum()) for d in (0, 1))
            seconds["experts_s"][step] += 40e-6 + 1e-10 * 3 * pairs * 64 * 96
            if dispatch == "coherent":
                seconds["kv_s"][step] += 30e-6 + 2e-9 * 32 * max(int(one.sum()) for one in held)
        here = after
    return seconds


def attention(tokens: int, contexts: int) -> float:
    """c0 + c1 n + c2 c of the case's multiply-adds, 4 n M^2 + (c + n) M."""
    return 10e-6 + 1e-10 * (4 * tokens * 64 * 64 + (contexts + tokens) * 64) if tokens else 0.0


def test_coherent_top_1_combines_for_nothing(make_trace: Any, make_profile: Any) -> None:
    trace, cluster = make_trace(samples=8, top_k=1), Cluster.parse("1x2")
    speeds = Speeds.of(load(make_profile("1x2")), cluster, trace.model, samples=True)
    assert speeds is not None
    found = predicted(tallied(trace, cluster, "coherent"), speeds, cluster, trace.model, "coherent").seconds
    assert not found["combine_s"].high.any()
    assert found["dispatch_s"].low.all()


def test_with_a_profile_the_verdict_is_on_the_seconds_of_a_step(make_trace: Any, make_profile: Any) -> None:
    plan = solve(request(make_trace(samples=120), make_profile()))
    assert plan.verdict is not None
    ours, theirs = (held_out(plan)[label].metrics["step_s"] for label in ("plan/coherent", "contiguous/standard"))
    assert plan.verdict.metric == "step_s"
    assert plan.verdict.gain.value == pytest.approx(theirs.value - ours.value)
    assert ours.low is not None
    assert ours.high is not None
    assert ours.low < ours.value < ours.high


def test_a_noisier_profile_gives_wider_intervals(make_trace: Any, make_profile: Any) -> None:
    widths = []
    for noise in (0.02, 0.4):
        step = held_out(solve(request(make_trace(samples=120), make_profile(noise=noise))))["plan/coherent"].metrics[
            "step_s"
        ]
        assert step.low is not None
        assert step.high is not None
        widths.append((step.high - step.low) / step.value)
    assert widths[1] > 2 * widths[0]


def test_the_same_request_gives_the_same_seconds(make_trace: Any, make_profile: Any) -> None:
    trace, profile = make_trace(samples=40), make_profile()
    one, again = (solve(request(trace, profile)) for _ in range(2))
    assert (one.evaluation, one.options, one.verdict) == (again.evaluation, again.options, again.verdict)


def test_links_alone_time_the_exchanges_but_no_step_and_copies_decide(make_trace: Any) -> None:
    cluster = Cluster.parse("2x2", ["intra=100:2", "inter=10:9"])
    plan = solve(request(make_trace(samples=120), None, cluster=cluster))
    assert plan.verdict is not None
    assert plan.verdict.metric == "device_copies"
    metrics = held_out(plan)["plan/coherent"].metrics
    assert {name for name in metrics if name.endswith("_s")} == {
        f"{part}{link}_s" for part in ("dispatch", "combine", "kv") for link in ("", "_intra", "_inter")
    }
    assert metrics["dispatch_inter_s"].value >= 3 * 9e-6
    options = SecondsOptions.model_validate(plan.options["seconds"])
    assert options.sources["dispatch inter"] == "link inter"
    assert "attention" in options.missing
    assert "expert_ffn" in options.missing["experts"]


def test_without_profile_and_links_there_are_no_seconds_and_nothing_is_said_of_them(make_trace: Any) -> None:
    plan = solve(request(make_trace(samples=40), None))
    assert "seconds" not in plan.options
    assert not any(name.endswith("_s") for contender in held_out(plan).values() for name in contender.metrics)


def test_a_part_without_a_series_is_left_out_by_name(make_trace: Any, make_profile: Any) -> None:
    profile = make_profile(cases=("all_to_all", "all_gather", "expert_ffn"))
    plan = solve(request(make_trace(samples=40), profile))
    assert plan.options["seconds"]["missing"] == {"attention": "the profile has no attention"}
    metrics = held_out(plan)["plan/standard"].metrics
    parts = [metrics[name].value for name in ("dispatch_s", "experts_s", "combine_s")]
    assert metrics["step_s"].value == pytest.approx(sum(parts))
    assert "attention_s" not in metrics


def test_without_samples_no_contexts_hence_no_attention(make_trace: Any, make_profile: Any) -> None:
    plan = solve(request(make_trace(samples=60, columns=("step",)), make_profile()))
    assert "samples" in plan.options["seconds"]["missing"]["attention"]


def test_sizes_outside_the_measured_ones_are_flagged_in_the_plan(make_trace: Any, make_profile: Any) -> None:
    inside = solve(request(make_trace(samples=60, tokens=30), make_profile()))
    outside = solve(request(make_trace(samples=60, tokens=400), make_profile()))
    assert outside.options["seconds"]["extrapolated"]["experts_s"] == 1.0
    assert inside.options["seconds"]["extrapolated"].get("experts_s", 0.0) < 1.0


def test_another_number_of_devices_than_measured_goes_by_the_link(make_trace: Any, make_profile: Any) -> None:
    profile = make_profile("1x4")
    cluster = Cluster(1, 2, load(profile).cluster.links)
    plan = solve(request(make_trace(samples=120), profile, cluster=cluster))
    assert plan.options["seconds"]["sources"]["dispatch intra"] == "link intra"
