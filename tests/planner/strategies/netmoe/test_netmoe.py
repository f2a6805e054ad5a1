"""NetMoE as a strategy: Figure 2, what predictors learn, the ablation, ways to deal, what screens say, real data."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from moeplan.errors import MoeplanError
from moeplan.planner.certify import certify
from moeplan.planner.evaluate.homes import Homes, Rehoming, deal
from moeplan.planner.evaluate.journey import Journey
from moeplan.planner.evaluate.replay import replay
from moeplan.planner.evaluate.scene import Scene
from moeplan.planner.evaluate.splits import Cohort
from moeplan.planner.evaluate.tally import Tally
from moeplan.planner.evaluate.traffic import SampleTraffic
from moeplan.planner.strategies.netmoe.policy import fit_predictor
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.migrating.predictor import Predictor
from moeplan.solvers import contiguous
from moeplan.solvers.placement import Placement
from moeplan.traces.count_form import open_any
from moeplan.traces.importers import import_trace
from tests.builders import known
from tests.planner.makers import edited, generated, judged, planned, said, scene_of, stored

FIG_2 = np.array([[0, 0, 3, 1], [1, 2, 1, 0], [1, 1, 0, 2], [3, 0, 0, 1]])  # expert i is on device i
LINKS = ("intra=100:2", "inter=10:5")
Counts = Callable[..., Any]


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Counts:
    """Traces of samples with preferences, each made once."""

    @cache
    def make(samples: int, alpha: float = 3.0, uneven: bool = False) -> Any:
        return generated(tmp_path_factory.mktemp("counts") / "t", alpha=alpha, samples=samples, uneven=uneven)

    return make


def solved(trace: Any, *asked: Any, **settings: Any) -> Any:
    return planned(trace, "netmoe", *asked, **settings)


def timed(trace: Any, **settings: Any) -> Any:
    """A policy judged by the seconds of exchanges."""
    return solved(trace, "2x2", LINKS, **settings)


def loads(trace: Any) -> Any:
    """The counts of all samples, `[I, L, E]`."""
    return np.concatenate([table.counts for table in trace.tables()]).reshape(-1, 3, 8)


def in_order(experts: int = 8, layers: int = 3) -> Placement:
    """Contiguous experts on 2x2."""
    return contiguous.solve(layers, experts, Cluster(2, 2)).placement


def rehomed(scene: Scene, rule: Any, placement: Placement) -> tuple[Homes, Tally]:
    """The homes that a rule gives all samples, and what they then send."""
    homes = rule(scene.samples, placement, scene.cohorts[0])
    ((tally,),) = replay(scene, [Journey("migrating", placement, moves=homes.device)])
    return homes, tally


@pytest.fixture(scope="module")
def plan(counts: Counts) -> Any:
    """A policy for samples with preferences, judged by bytes."""
    return solved(counts(160))


def test_figure_2_leaves_2_of_5_tokens_a_node_to_cross(tmp_path: Path) -> None:
    scene = scene_of(stored(tmp_path / "trace", FIG_2[:, None], ("sample",), top_k=1), "2x2", moving=True)
    ports = known(rehomed(scene, Rehoming("sum"), in_order(4, 1))[1].ports)
    assert ports.dispatch[0, 0, 1, 0].reshape(2, 2).sum(axis=1).tolist() == [5, 5]
    assert ports.combine[0, 0, 1, 1].reshape(2, 2).sum(axis=1).tolist() == [2, 2]


@pytest.mark.parametrize("method", ["sum", "bottleneck", "paper"])
def test_every_device_has_as_many_samples_of_a_step_in_every_layer(make_trace: Any, method: str) -> None:
    scene = scene_of(make_trace(samples=16, tokens=6), "2x2", moving=True, each=8)
    homes, step_I = rehomed(scene, Rehoming(method), in_order())[0], scene.cohorts[0].step
    assert all(np.bincount(at[step_I == s], minlength=4).max() == 2 for at in homes.device for s in (0, 1))


def test_prediction_closes_in_on_the_oracle(plan: Any) -> None:
    labels = ("oracle/migrating", "plan/migrating", "unpredicted/migrating", "contiguous/standard")
    oracle, ours, none, base = (judged(plan)[label]["inter_bytes"] for label in labels)
    assert oracle <= ours < none < base
    assert ours - oracle < 0.1 * (none - oracle)


def test_unpredicted_is_what_the_papers_method_plans(counts: Counts) -> None:
    sample, paper = (judged(solved(counts(96), method=method)) for method in ("sum", "paper"))
    assert sample["unpredicted/migrating"] == paper["plan/migrating"]
    assert "unpredicted/migrating" not in paper


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("method", ["sum", "even"])
def test_a_global_frequency_changes_no_home(counts: Counts, method: str, uneven: bool) -> None:
    """What every device gets at the next layer is counted for all fitted samples together."""
    trace = counts(64, uneven=uneven)
    frequency_LD = loads(trace).sum(axis=0).reshape(3, 4, 2).sum(axis=2) / 64

    def globally(layer: int, experts: np.ndarray) -> np.ndarray | None:
        return None if layer == 2 else np.tile(frequency_LD[layer + 1], (len(experts), 1))

    scene, frequent = scene_of(trace, "2x2", moving=True, each=16), cast(Predictor, SimpleNamespace(copies=globally))
    blind, seeing = (rehomed(scene, Rehoming(method, one), in_order())[0].device for one in (None, frequent))
    np.testing.assert_array_equal(blind, seeing)
    assert (blind[1:] != blind[:-1]).any()


def of_chain(samples: int, *, linked: bool) -> tuple[np.ndarray, SampleTraffic, np.ndarray]:
    """Samples with tastes of their own whose tokens follow one chain of experts, and the chain by device."""
    rng = np.random.default_rng(0)
    placement = contiguous.solve(2, 8, Cluster(1, 4)).placement
    traffic = SampleTraffic.empty(placement, samples, Cluster(1, 4), linked=linked)
    experts = np.zeros((samples, 2, 8), np.int32)
    chain = rng.dirichlet(np.full(8, 0.1), 8)
    for i in range(samples):
        experts[i, 0] = rng.multinomial(300, rng.dirichlet(np.full(8, 0.3)))
        onward = np.array([rng.multinomial(n, p) for n, p in zip(experts[i, 0], chain, strict=True)])
        traffic.copies[i, 1] = onward.sum(axis=0).reshape(4, 2).sum(axis=1)
        if traffic.linked is not None:
            traffic.linked[0] += onward.reshape(8, 4, 2).sum(axis=2)
    return experts, traffic, chain.reshape(8, 4, 2).sum(axis=2)


def test_a_predictor_finds_the_chain_and_linked_tokens_help_where_samples_are_few() -> None:
    errors = {}
    for samples, linked in ((200, True), (200, False), (3, True), (3, False)):
        experts, traffic, chain = of_chain(samples, linked=linked)
        predictor = fit_predictor(experts, traffic, np.ones(samples, bool), top_k=1)
        errors[samples, linked] = np.abs(predictor.per_pair[0] - chain)
    assert errors[200, True].max() < 0.02
    assert errors[200, False].max() < 0.05
    assert errors[3, True].mean() < 0.5 * errors[3, False].mean()


def test_samples_that_are_held_out_teach_nothing() -> None:
    experts, traffic, _ = of_chain(20, linked=False)
    fitted = np.arange(20) < 10
    one = fit_predictor(experts, traffic, fitted, top_k=1)
    experts[10:] = traffic.copies[10:] = 7
    np.testing.assert_array_equal(fit_predictor(experts, traffic, fitted, top_k=1).per_pair, one.per_pair)


def test_the_method_that_is_fastest_on_the_fitted_steps_is_taken_where_exchanges_are_timed(counts: Counts) -> None:
    trace = counts(192, 40.0, uneven=True)
    chosen, plain = (timed(trace, method=method) for method in (None, "sum"))
    assert chosen.decisions.sample_policy.method == "bottleneck"
    fastest, summed = (judged(plan)["plan/migrating"]["exchange_s"] for plan in (chosen, plain))
    assert fastest < summed
    tried_s = chosen.options["sample_policy"]["tried_s"]
    assert tried_s["bottleneck"] < tried_s["even"] < tried_s["sum"]
    assert "\ntried " in said(chosen)
    assert not plain.options["sample_policy"]["tried_s"]
    assert solved(trace).decisions.sample_policy.method == "sum"


@pytest.mark.parametrize(
    ("cluster", "chosen", "dealt"), [("1x3", 7, [0, 0, 1, 1, 2, 2, 2]), ("1x2", 5, [0, 0, 1, 0, 1])]
)
def test_dealt_gives_the_longest_sample_that_is_left_to_the_device_with_fewest_tokens(
    cluster: str, chosen: int, dealt: list[int]
) -> None:
    length, step = np.array([9, 1, 8, 2, 7, 3, 5])[:chosen], np.array([0, 0, 0, 0, 0, 0, -1])[:chosen]
    cohort = Cohort(np.arange(chosen), length, np.full(chosen, 2), step)
    placement, uncounted = contiguous.solve(2, 6, Cluster.parse(cluster)).placement, SimpleNamespace()
    device_LI = deal(uncounted, placement, cohort).device  # type: ignore[arg-type]
    assert device_LI.tolist() == [dealt] * 3


def test_no_way_to_deal_samples_beats_the_bound_of_another(counts: Counts) -> None:
    one, other = (solved(counts(96, uneven=True), method=method).outcome["sample_policy"] for method in ("sum", "even"))
    assert other.bound == pytest.approx(one.bound, rel=1e-9)
    assert one.bound <= one.objective.value * (1 + 1e-9)
    assert one.objective.value < 0.9 * other.objective.value
    assert other.status == "feasible"


@pytest.mark.parametrize(("alpha", "uneven"), [(3.0, False), (400.0, True)])
def test_what_dealing_by_length_gives_stands_below_a_verdict_on_seconds_and_not_on_bytes(
    counts: Counts, plan: Any, alpha: float, uneven: bool
) -> None:
    assert "by length" not in said(plan)
    plan = timed(counts(160, alpha, uneven=uneven))
    dealt, base, ours = (
        judged(plan)[label]["exchange_s"] for label in ("dealt/standard", "contiguous/standard", "plan/migrating")
    )
    less = f"takes {1 - dealt / base:z.1%} less than contiguous, standard"
    assert f"dealing samples by length alone, once per step in a data loader, {less}" in said(plan)
    over = plan.options["sample_policy"]["over_dealt"]
    assert over["value"] == pytest.approx(dealt - ours)
    for low, told in ((0.0199, True), (0.0201, False), (over["low"] / dealt, over["low"] <= 0.02 * dealt)):
        screen = said(edited(plan, "options.sample_policy.over_dealt.low", low * dealt))
        assert ("dealing by length does as well" in screen) == told


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        ((0.006, 0.005, 0.007), "no benefit expected: 0.6 % fewer bytes between nodes than today"),
        ((-0.01, -0.02, -0.005), "no benefit expected: 1.0 % more bytes between nodes than today"),
        ((0.05, 0.04, 0.06), "benefit: 5.0 % fewer bytes between nodes than today"),
    ],
)
def test_a_gain_that_must_reach_a_share_is_told_as_one(plan: Any, gain: Any, words: str) -> None:
    assert plan.verdict.at_least == 0.02
    value, low, high = (judged(plan)["contiguous/standard"]["inter_bytes"] * share for share in gain)
    forged = edited(plan, "verdict.gain", {"value": value, "low": low, "high": high})
    screen = said(edited(forged, "verdict.value", "benefit" if gain[1] > 0.02 else "none"))
    assert words in screen
    assert ("; moving samples pays where the gain is surely above 2%" in screen) == (0 < gain[1] < 0.02)


def test_few_steps_are_told(counts: Counts) -> None:
    few, more = (solved(counts(160), samples_per_step=size) for size in (16, 4))
    steps = [plan.evaluation.held_out.num_steps for plan in (few, more)]
    assert steps[0] < 10 < steps[1]
    assert f"judged on {steps[0]} steps, which are few" in said(few)
    assert "which are few" not in said(more)


@pytest.mark.parametrize(("seconds", "told"), [(1.25, "take 25.0% longer"), (0.75, "take 25.0% less time")])
def test_exchanges_that_take_longer_cost_time_and_shorter_ones_less(counts: Counts, seconds: float, told: str) -> None:
    plan = timed(counts(64), method="sum")
    taken = seconds * judged(plan)["contiguous/standard"]["exchange_s"]
    screen = said(edited(plan, "evaluation.held_out.contenders.0.metrics.exchange_s.value", taken))
    assert f"dispatch and combine {told}" in screen
    assert ("costs time: " in screen) == (seconds > 1)


def test_samples_that_are_all_alike_have_no_locality_and_no_benefit(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "dtype_bytes": 2}
    plan = solved(stored(tmp_path / "alike", np.full((256, 3, 8), 64), ("sample",), **sizes))
    assert (plan.verdict.value, plan.verdict.metric) == ("none", "inter_bytes")
    assert "no homes save more than 0.0%" in said(plan)
    assert "0.0% fewer bytes between nodes than contiguous, standard" in said(plan)


def test_placement_and_homes_together_save_more_than_either_alone(tmp_path: Path, make_trace: Any) -> None:
    trace, base = make_trace(samples=128, tokens=8, layers=4, top_k=1, seed=3), tmp_path / "base.json"
    planned(trace, dispatch_model="standard", time_limit_s=5, to=base)
    plan = solved(trace, on=base, to=tmp_path / "plan.json")
    copies = {label: metrics["inter_bytes"] for label, metrics in judged(plan).items()}
    assert [*copies] == [
        "plan/migrating",
        "contiguous/standard",
        "oracle/migrating",
        "unpredicted/migrating",
        "base/standard",
        "contiguous/migrating",
        "dealt/standard",
    ]
    assert copies["plan/migrating"] < min(copies["base/standard"], copies["contiguous/migrating"])
    assert plan.verdict.against == "contiguous/standard"
    assert plan.strategies == ("exflow", "netmoe")
    assert "the placement alone saves" in said(plan)
    assert "metrics of every contender" in certify(plan, trace.path, folder=tmp_path).checks


def test_gpt_oss_saves_something_and_says_so(gpt_oss: Path, tmp_path: Path) -> None:
    import_trace(gpt_oss, tmp_path / "trace", hidden_size=2880, dtype_bytes=2)
    labels = ("contiguous/standard", "plan/migrating", "oracle/migrating")
    by_label = judged(solved(open_any(tmp_path / "trace"), "2x4"))
    base, plan, oracle = (by_label[label]["inter_bytes"] for label in labels)
    assert 1 - plan / base == pytest.approx(0.064, abs=0.01)
    assert 1 - oracle / base == pytest.approx(0.071, abs=0.01)
    shutil.rmtree(tmp_path / "trace")


def test_a_cluster_that_the_placement_does_not_fit_is_refused_in_one_line(counts: Counts) -> None:
    with pytest.raises(MoeplanError, match="1x3: 3 devices do not divide 8 experts, and counts do not say") as caught:
        solved(counts(20), "1x3")
    assert "\n" not in str(caught.value)


def test_where_a_device_is_dead_today_and_experts_in_order_leave_it_out_and_the_screen_says_so(
    make_trace: Any, tmp_path: Path
) -> None:
    trace, base = make_trace(samples=70, tokens=5), tmp_path / "base.json"
    planned(trace, "eplb", "1x4", dead=(1,), slots=3, to=base)
    plan = solved(trace, "1x4", on=base, to=tmp_path / "plan.json")
    usual = "contiguous without 1/standard"
    assert plan.verdict.against == usual
    assert "re-homing alone" in said(plan)
    assert judged(plan)["contiguous/migrating"]["balance"] == pytest.approx(judged(plan)[usual]["balance"])
    assert "verdict" in certify(plan, trace.path, folder=tmp_path).checks
