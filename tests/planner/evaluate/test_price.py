"""Predicted seconds against formulas: profiles whose curves are known, and tokens walked by hand."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.planner.evaluate.costs import CostModel
from moeplan.planner.evaluate.journey import Journey
from moeplan.planner.evaluate.price import price
from moeplan.planner.evaluate.replay import replay
from moeplan.planner.evaluate.scene import Scene
from moeplan.planner.evaluate.tally import COUNTS, Ports, Tally
from moeplan.planner.options import SecondsOptions
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.fits.fit import Prediction
from moeplan.profilers.profile import load
from moeplan.runtime.plan import Contender, Plan
from moeplan.solvers.placement import Placement
from moeplan.solvers.ports import port_copies, remote_visits
from moeplan.traces.model import Attention
from tests.builders import model
from tests.planner.makers import part_of, scene_of

HALVES = Placement.from_sets([[[0, 1, 2, 3], [4, 5, 6, 7]]] * 3, 8)


def request(trace: Any, profile: Path | None, **changes: Any) -> Request:
    cluster = Cluster.parse("1x4") if profile is None else load(profile).cluster
    settings: dict[str, Any] = {"strategy": "exflow", "trace": str(trace.path), "cluster": cluster, "profile": profile}
    return Request.of(**settings | changes)


def held_out(plan: Plan) -> dict[str, Contender]:
    return {contender.label: contender for contender in part_of(plan).contenders}


def priced(trace: Any, profile: Path, dispatch: Any) -> dict[str, Any]:
    """Seconds of every step on two devices, `[Q, B]`, by metric."""
    scene, journey = scene_of(trace, "1x2", profile=profile), Journey(dispatch, HALVES)
    ((tally,),) = replay(scene, [journey], ports=True)
    return dict(price(tally, journey, scene).levels)


@pytest.mark.parametrize("dispatch", ["standard", "coherent"])
def test_a_step_is_what_the_formulas_behind_the_profile_give(make_trace: Any, make_profile: Any, dispatch: str) -> None:
    """Two devices, samples of 10 tokens at home on their ordinal mod 2; every token walked in Python."""
    trace = make_trace(samples=8)
    found = {name: levels[1] for name, levels in priced(trace, make_profile("1x2", noise=0.0), dispatch).items()}
    expected = naive(np.concatenate([batch.ids for batch in trace.batches()]), dispatch)
    assert expected.keys() <= found.keys()
    for name, seconds in expected.items():
        np.testing.assert_allclose(found[name], seconds, rtol=0.03, err_msg=name)
    assert ("kv_s" in found) == (dispatch == "coherent")
    np.testing.assert_allclose(found["step_s"], sum(found[name] for name in expected))


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


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_samples_that_move_between_layers_take_what_a_token_by_token_simulation_gives(seed: int) -> None:
    """Migrating on 2x2: in each layer a sample is where its last combine delivered it, and attends there."""
    cluster, rng = Cluster.parse("2x2"), np.random.default_rng(seed)
    home_IL, ids_TLK = rng.integers(4, size=(6, 4)), rng.integers(8, size=(30, 3, 2))
    ids_TLK[rng.random(30) < 0.1] = 8  # not routed
    sample_T, position_T = np.repeat(np.arange(6), 5), np.tile(np.arange(5), 6)
    step_T = sample_T // 3
    ports, loads = Ports.empty("migrating", 2, 3, cluster), np.zeros((2, 3, 4), np.int64)
    for layer in range(3):
        device_TK = np.where(ids_TLK[:, layer] < 8, ids_TLK[:, layer] // 2, -1)
        here_T = home_IL[sample_T, layer]
        next_T = home_IL[sample_T, layer + 1]
        for end_T, copies in ((here_T, ports.dispatch), (next_T, ports.combine[:, :, :, ::-1])):
            visits_KT = remote_visits(device_TK, end_T)
            copies[:, layer] = port_copies(visits_KT, device_TK, end_T, step_T, num_steps=2, cluster=cluster)
        np.add.at(ports.tokens[:, layer], (step_T, here_T), 1)
        np.add.at(ports.contexts[:, layer], (step_T, here_T), 2 * position_T + 1)
        for device_T in device_TK.T:
            np.add.at(loads[:, layer], (step_T[device_T >= 0], device_T[device_T >= 0]), 1)
    counts = np.zeros((6, len(COUNTS)), np.int64)
    nothing: Any = None
    scene = Scene(nothing, nothing, [], cluster, model(hidden_size=10, dtype_bytes=2), LINES, seed=0)
    tally, pairs = (
        Tally(counts, loads, np.full(4, 2), ports),
        Placement.from_sets([[[0, 1], [2, 3], [4, 5], [6, 7]]] * 3, 8),
    )
    found = {name: levels[1] for name, levels in price(tally, Journey("migrating", pairs), scene).levels.items()}
    assert {"attention_s", "dispatch_s", "experts_s", "combine_s", "step_s", "combine_inter_s"} <= found.keys()
    assert "kv_s" not in found
    for step in (0, 1):
        expected = dict.fromkeys(("attention_s", "dispatch_s", "experts_s", "combine_s"), 0.0)
        for layer in range(3):
            for name, seconds in simulated(
                ids_TLK[step_T == step, layer].tolist(), home_IL[step * 3 :, layer:]
            ).items():
                expected[name] += seconds
        for name, seconds in expected.items():
            assert found[name][step] == pytest.approx(seconds), name
        assert found["step_s"][step] == pytest.approx(sum(expected.values()))


def simulated(ids: list[list[int]], homes: Any) -> dict[str, float]:
    """A layer of three samples of five tokens on 2x2 by `LINES`: attend, send, compute, bring to the next home."""
    attending: dict[int, list[int]] = {device: [] for device in range(4)}
    sent: dict[str, Counter[Any]] = {"dispatch_s": Counter(), "combine_s": Counter()}
    pairs: Counter[int] = Counter()
    for token, chosen in enumerate(ids):
        here, then = homes[token // 5][:2].tolist()
        attending[here].append(token % 5)
        pairs.update(expert // 2 for expert in chosen if expert < 8)
        for device in {expert // 2 for expert in chosen if expert < 8}:
            for name, source, target in (("dispatch_s", here, device), ("combine_s", device, then)):
                if source != target:
                    far = source // 2 != target // 2
                    sent[name].update([(far, "out", source), (far, "in", target)])
    seconds = {
        name: max(
            slope_s + 20 * slope_s * max((n for (far, *_), n in ports.items() if far == inter), default=0)
            for inter, slope_s in ((False, 1.0), (True, 7.0))
        )
        for name, ports in sent.items()
    }
    seconds["experts_s"] = 1 + 0.5 * max(pairs.values()) * 2 if pairs else 0.0
    seconds["attention_s"] = max(1 + 0.5 * sum(2 * p + 1 for p in at) for at in attending.values() if at)
    return seconds


def known(seconds: Any) -> Prediction:
    return Prediction(seconds, seconds, seconds, np.zeros(seconds.shape, bool))


LINES = CostModel(
    exchange=[lambda port: known(1.0 + port), lambda port: known(7.0 + 7.0 * port)],
    gather=None,
    experts=lambda pairs, experts: known(1.0 + 0.5 * pairs * experts),
    attention=lambda batch, length: known(1.0 + 0.5 * batch * length * length),
    sources={},
    missing={},
    other_dtype=(),
)


def test_coherent_top_1_combines_for_nothing(make_trace: Any, make_profile: Any) -> None:
    found = priced(make_trace(samples=8, top_k=1), make_profile("1x2"), "coherent")
    assert not found["combine_s"].any()
    assert found["dispatch_s"].all()


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
    assert {name for name in metrics if name.endswith("_s")} == {"exchange_s"} | {
        f"{part}{link}_s" for part in ("dispatch", "combine", "kv") for link in ("", "_intra", "_inter")
    }
    assert metrics["dispatch_inter_s"].value >= 3 * 9e-6
    options = SecondsOptions.model_validate(plan.options["seconds"])
    assert options.sources["dispatch inter"] == "link inter"
    assert "attention" in options.missing
    assert options.missing["experts"] == "no profile"


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


@pytest.mark.parametrize(
    ("dispatch", "cases", "metric"),
    [
        ("coherent", ("all_to_all", "all_gather", "expert_ffn"), "device_copies"),
        ("coherent", ("all_to_all", "all_gather", "expert_ffn", "attention"), "step_s"),
        ("standard", ("all_to_all", "all_gather", "expert_ffn"), "step_s"),
    ],
)
def test_a_step_without_attention_judges_only_between_contenders_of_one_dispatch_model(
    make_trace: Any, make_profile: Any, dispatch: Any, cases: Any, metric: str
) -> None:
    """What coherence costs, tokens that pile up on a device, is in attention."""
    plan = solve(request(make_trace(samples=40), make_profile(cases=cases), dispatch_model=dispatch))
    assert plan.verdict is not None
    assert plan.verdict.metric == metric
    ours, theirs = (held_out(plan)[label].metrics for label in (f"plan/{dispatch}", "contiguous/standard"))
    assert "step_s" in ours
    assert plan.verdict.gain.value == pytest.approx(theirs[metric].value - ours[metric].value)


@pytest.mark.parametrize(
    ("known", "source", "other_dtype"),
    [
        ({"attention": Attention(kv_size=128), "dtype_bytes": 4}, "attention/fp32", ()),
        ({"attention": Attention(kv_size=16)}, "attention/fp32 (as MHA)", ("experts", "attention")),
    ],
)
def test_attention_of_fewer_keys_and_parts_in_another_dtype_are_named(
    make_trace: Any, make_profile: Any, known: Any, source: str, other_dtype: Any
) -> None:
    spec = replace(make_trace().model, **known)
    costs = CostModel.of(load(make_profile()), Cluster.parse("1x4"), spec, samples=True)
    assert costs is not None
    assert (costs.sources["attention"], costs.other_dtype) == (source, other_dtype)


def test_a_part_with_one_of_two_links_is_missing_and_has_no_source(make_trace: Any) -> None:
    costs = CostModel.of(None, Cluster.parse("2x2", ["intra=100:2"]), make_trace().model, samples=True)
    assert costs is not None
    assert not costs.sources
    assert "--link inter=" in costs.missing["dispatch"]
    assert costs.exchange is None


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
