"""NetMoE as a strategy: exchanges against a token-by-token twin, Figure 2, the ablation, ways to deal, real data."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from moeplan.errors import MoeplanError
from moeplan.planner.certify import certify
from moeplan.planner.evaluate.homes import Dealt, Homes, Rehoming
from moeplan.planner.evaluate.journey import Journey
from moeplan.planner.evaluate.replay import replay
from moeplan.planner.evaluate.scene import Scene
from moeplan.planner.evaluate.splits import Cohort
from moeplan.planner.evaluate.tally import COUNTS, Ports, Tally
from moeplan.planner.figures import find
from moeplan.planner.request import Request
from moeplan.planner.solve import make
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.migrating.predictor import Predictor
from moeplan.runtime.plan import Plan
from moeplan.solvers import contiguous
from moeplan.solvers.placement import Placement
from moeplan.solvers.seconds import exchange_seconds, slowest
from moeplan.traces.count_form import CountTable, open_any, read_counts, write_counts
from moeplan.traces.importers import import_trace
from moeplan.traces.reader import Trace
from tests.planner.edits import edited
from tests.planner.makers import generated, judged, part_of, said, scene_of, solved, stored

MakeTrace = Callable[..., Trace]
FIG_2 = np.array([[0, 0, 3, 1], [1, 2, 1, 0], [1, 1, 0, 2], [3, 0, 0, 1]])  # expert i is on device i
LINKS = ("intra=100:2", "inter=10:5")


def in_order(experts: int = 8, layers: int = 3) -> Placement:
    """Contiguous experts on 2x2."""
    return contiguous.solve(layers, experts, Cluster(2, 2)).placement


def rehomed(scene: Scene, rule: Any, placement: Placement) -> tuple[Homes, Tally]:
    """The homes that a rule gives all samples, and what they then send."""
    assert scene.samples is not None
    homes = rule(scene.samples, placement, scene.cohorts[0])
    ((tally,),) = replay(scene, [Journey("migrating", placement, moves=homes.device)])
    return homes, tally


def ports_of(tally: Tally) -> Ports:
    assert tally.ports is not None
    return tally.ports


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A policy for samples with preferences, judged by bytes."""
    return solved(generated(tmp_path_factory.mktemp("counts") / "trace", alpha=3.0, samples=160)).plan


def test_figure_2_leaves_2_of_5_tokens_a_node_to_cross(tmp_path: Path) -> None:
    scene = scene_of(stored(tmp_path / "trace", FIG_2[:, None], ("sample",), top_k=1), "2x2", moving=True)
    ports = ports_of(rehomed(scene, Rehoming("sum"), in_order(4, 1))[1])
    assert ports.dispatch[0, 0, 1, 0].reshape(2, 2).sum(axis=1).tolist() == [5, 5]
    assert ports.combine[0, 0, 1, 1].reshape(2, 2).sum(axis=1).tolist() == [2, 2]


def test_without_moves_its_baseline_is_that_of_placement_strategies(make_trace: MakeTrace) -> None:
    trace = make_trace(samples=64, tokens=7, unrouted=0.05)
    options: dict[str, Any] = {"fit_fraction": 1.0, "samples_per_step": 16}
    ours = judged(solved(trace, links=LINKS, **options).plan)["contiguous/standard"]
    request = Request.of(strategy="contiguous", trace=trace.path, cluster=Cluster.parse("2x2", LINKS), **options)
    theirs = judged(make(request).plan)["contiguous/standard"]
    shared = set(ours) & set(theirs)
    assert {"device_copies", "node_copies", "inter_bytes", "intra_bytes", "balance", "dispatch_s", "combine_s"} < shared
    for name in shared:
        assert ours[name] == pytest.approx(theirs[name]), name
    assert ours["samples_moved"] == 0


@pytest.mark.parametrize("method", ["sum", "bottleneck", "paper"])
def test_exchanges_are_those_of_tokens_that_follow_their_samples(make_trace: MakeTrace, method: str) -> None:
    trace = make_trace(samples=16, tokens=6)
    scene = scene_of(trace, "2x2", moving=True, each=8)
    homes, tally = rehomed(scene, Rehoming(method), in_order())
    (cohort,) = scene.cohorts
    assert cohort.step is not None
    copies, far, dispatch, combine = np.zeros(2), np.zeros(2), np.zeros((2, 3, 2, 2, 4)), np.zeros((2, 3, 2, 2, 4))
    for batch in trace.batches():
        assert batch.sample is not None
        for t in range(len(batch)):
            who = int(batch.sample[t]) // 7
            step = cohort.step[who]
            for layer in range(3):
                for device in {int(e) // 2 for e in batch.ids[t, layer]}:
                    for end, ports, leaves in (
                        (homes.device[layer, who], dispatch, 0),
                        (homes.device[layer + 1, who], combine, 1),
                    ):
                        if device != end:
                            link = int(device // 2 != end // 2)
                            copies[step] += 1
                            far[step] += link
                            ports[step, layer, link, leaves, end] += 1
                            ports[step, layer, link, 1 - leaves, device] += 1
    np.testing.assert_array_equal(tally.counts[:, COUNTS.index("device_copies")], copies)
    np.testing.assert_array_equal(tally.counts[:, COUNTS.index("far_copies")], far)
    np.testing.assert_array_equal(ports_of(tally).dispatch, dispatch)
    np.testing.assert_array_equal(ports_of(tally).combine, combine)
    assert all(np.bincount(at[cohort.step == s], minlength=4).max() == 2 for at in homes.device for s in (0, 1))


def test_prediction_closes_in_on_the_oracle(plan: Plan) -> None:
    found = {label: metrics["inter_bytes"] for label, metrics in judged(plan).items()}
    oracle, ours, none, base = (
        found[label] for label in ("oracle/migrating", "plan/migrating", "unpredicted/migrating", "contiguous/standard")
    )
    assert oracle <= ours < none < base
    assert ours - oracle < 0.1 * (none - oracle)


def test_unpredicted_is_what_the_papers_method_plans(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0, samples=96)
    sample, paper = (judged(solved(trace, method=method).plan) for method in ("sum", "paper"))
    assert sample["unpredicted/migrating"] == paper["plan/migrating"]
    assert "unpredicted/migrating" not in paper


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("method", ["sum", "even"])
def test_a_global_frequency_changes_no_home(tmp_path: Path, method: str, uneven: bool) -> None:
    """What every device gets at the next layer is counted one by one, for all fitted samples together."""
    trace = generated(tmp_path / "trace", alpha=3.0, samples=64, uneven=uneven)
    frequency: list[list[int]] = [[0] * 4 for _ in range(3)]
    for table in trace.tables():
        for layer, counts in zip(table.layer.tolist(), table.counts.tolist(), strict=True):
            for expert, count in enumerate(counts):
                frequency[layer][expert // 2] += count

    def globally(layer: int, experts: np.ndarray) -> np.ndarray | None:
        return None if layer == 2 else np.tile(np.array(frequency[layer + 1]) / 64, (len(experts), 1))

    scene, known = scene_of(trace, "2x2", moving=True, each=16), cast(Predictor, SimpleNamespace(copies=globally))
    blind, frequent = (rehomed(scene, Rehoming(method, predictor), in_order())[0].device for predictor in (None, known))
    np.testing.assert_array_equal(blind, frequent)
    assert (blind[1:] != blind[:-1]).any()


def test_the_method_that_is_fastest_on_the_fitted_steps_is_taken_where_exchanges_are_timed(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=40.0, samples=192, uneven=True)
    chosen, plain = (solved(trace, links=LINKS, method=method).plan for method in (None, "sum"))
    assert chosen.decisions.sample_policy is not None
    assert chosen.decisions.sample_policy.method == "bottleneck"
    fastest, summed = (judged(plan)["plan/migrating"]["exchange_s"] for plan in (chosen, plain))
    assert fastest < summed
    tried_s = chosen.options["sample_policy"]["tried_s"]
    assert tried_s["bottleneck"] < tried_s["even"] < tried_s["sum"]
    assert "\ntried " in said(chosen)
    assert not plain.options["sample_policy"]["tried_s"]
    untimed = solved(trace).plan.decisions.sample_policy
    assert untimed is not None
    assert untimed.method == "sum"


@pytest.mark.parametrize("name", ["1x4", "2x2", "4x1"])
def test_what_bottleneck_minimises_are_the_seconds_that_exchanges_are_predicted_to_take(
    tmp_path: Path, name: str
) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0, samples=48, uneven=True)
    cluster = Cluster.parse(name, [] if name == "1x4" else ["inter=10:5"]).linked(["intra=100:2"])
    scene, placement = scene_of(trace, cluster, moving=True, each=16), contiguous.solve(3, 8, cluster).placement
    rule = Rehoming("bottleneck", oracle=True, bounded=scene.cohorts[0])
    homes, tally = rehomed(scene, rule, placement)
    assert scene.costs is not None
    assert scene.costs.exchange is not None
    dispatch, combine = (
        slowest(exchange_seconds(copies, 128.0, scene.costs.exchange)).seconds
        for copies in (ports_of(tally).dispatch, ports_of(tally).combine)
    )
    assert homes.totals.name == "exchange_s"
    assert homes.totals.value == pytest.approx(combine.sum() + dispatch[:, 1:].sum(), rel=1e-12)
    assert 0.8 * homes.totals.value < homes.totals.bound <= homes.totals.value


def test_even_gives_every_device_one_of_each_round(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    length = rng.permutation(10) + 1
    counts = rng.multinomial(length[:, None] * 20, [0.25] * 4, (10, 2))
    scene = scene_of(stored(tmp_path / "trace", counts, ("sample",)), "2x2", moving=True, each=10)
    homes = rehomed(scene, Rehoming("even"), in_order(4, 2))[0].device
    for first in (10, 6, 2):
        devices = homes[1:, (length <= first) & (length > first - 4)]
        assert all(len(set(row)) == len(row) for row in devices.tolist())


@pytest.mark.parametrize(
    ("cluster", "chosen", "dealt"), [("1x3", 7, [0, 0, 1, 1, 2, 2, 2]), ("1x2", 5, [0, 0, 1, 0, 1])]
)
def test_dealt_gives_the_longest_sample_that_is_left_to_the_device_with_fewest_tokens(
    cluster: str, chosen: int, dealt: list[int]
) -> None:
    length, step = np.array([9, 1, 8, 2, 7, 3, 5])[:chosen], np.array([0, 0, 0, 0, 0, 0, -1])[:chosen]
    cohort = Cohort(np.arange(chosen), length, np.full(chosen, 2), step)
    placement, uncounted = contiguous.solve(2, 6, Cluster.parse(cluster)).placement, SimpleNamespace()
    device_LI = Dealt()(uncounted, placement, cohort).device  # type: ignore[arg-type]
    assert device_LI.tolist() == [dealt] * 3


@pytest.mark.parametrize("uneven", [False, True])
def test_what_dealing_by_length_gives_stands_below_a_verdict_on_seconds(tmp_path: Path, uneven: bool) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0 if not uneven else 400.0, samples=160, uneven=uneven)
    plan = solved(trace, links=LINKS).plan
    found = judged(plan)
    dealt, base = (found[label]["exchange_s"] for label in ("dealt/standard", "contiguous/standard"))
    less = f"takes {1 - dealt / base:z.1%} less than contiguous, standard"
    assert f"dealing samples by length alone, once per step in a data loader, {less}" in said(plan)
    over = plan.options["sample_policy"]["over_dealt"]
    assert over["value"] == pytest.approx(dealt - found["plan/migrating"]["exchange_s"])
    assert ("dealing by length does as well" in said(plan)) == (over["low"] <= 0.02 * dealt)
    for low, told in ((0.0199, True), (0.0201, False)):
        screen = said(edited(plan, "options.sample_policy.over_dealt.low", low * dealt))
        assert ("dealing by length does as well" in screen) == told


def test_a_verdict_on_bytes_says_nothing_of_dealing_by_length(plan: Plan) -> None:
    assert "by length" not in said(plan)


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        ((0.006, 0.005, 0.007), "no benefit expected: 0.6 % fewer bytes between nodes than today"),
        ((-0.01, -0.02, -0.005), "no benefit expected: 1.0 % more bytes between nodes than today"),
        ((0.05, 0.04, 0.06), "benefit: 5.0 % fewer bytes between nodes than today"),
    ],
)
def test_a_gain_that_must_reach_a_share_is_told_as_one(plan: Plan, gain: Any, words: str) -> None:
    assert plan.verdict is not None
    base = judged(plan)["contiguous/standard"]["inter_bytes"]
    assert plan.verdict.at_least == 0.02
    value, low, high = (base * share for share in gain)
    told = edited(plan, "verdict.gain", {"value": value, "low": low, "high": high})
    screen = said(edited(told, "verdict.value", "benefit" if gain[1] > 0.02 else "none"))
    assert words in screen
    assert ("; a gain below 2% does not pay for moving samples" in screen) == (0 < gain[1] < 0.02)


def test_few_steps_are_told(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0, samples=160)
    plans = [solved(trace, samples_per_step=size).plan for size in (16, 4)]
    steps = [part_of(plan).num_steps for plan in plans]
    assert steps[0] < 10 < steps[1]
    assert [f"judged on {steps[0]} steps, which are few" in said(plan) for plan in plans] == [True, False]


def test_no_way_to_deal_samples_beats_the_bound_of_another(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0, samples=96, uneven=True)
    found = [solved(trace, method=method).plan.outcome["sample_policy"] for method in ("sum", "even")]
    values, bounds = [one.objective.value for one in found], [one.bound for one in found]
    assert bounds[0] is not None
    assert bounds[1] == pytest.approx(bounds[0], rel=1e-9)
    assert bounds[0] <= values[0] * (1 + 1e-9)
    assert values[0] < 0.9 * values[1]
    assert found[1].status == "feasible"


@pytest.mark.parametrize(("seconds", "told"), [(1.25, "take 25.0% longer"), (0.75, "take 25.0% less time")])
def test_exchanges_that_take_longer_cost_time_and_shorter_ones_less(tmp_path: Path, seconds: float, told: str) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0, samples=64)
    plan = solved(trace, links=LINKS, method="sum").plan
    base = judged(plan)["contiguous/standard"]["exchange_s"]
    screen = said(edited(plan, "evaluation.held_out.contenders.0.metrics.exchange_s.value", seconds * base))
    assert f"dispatch and combine {told}" in screen
    assert ("costs time: " in screen) == (seconds > 1)


def test_samples_that_are_all_alike_have_no_locality_and_no_benefit(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0)
    table = next(trace.tables())
    alike = CountTable(sample=table.sample, layer=table.layer, counts=np.full_like(table.counts, 64))
    write_counts(tmp_path / "alike", trace.meta, [alike])
    plan = solved(read_counts(tmp_path / "alike")).plan
    assert plan.verdict is not None
    assert (plan.verdict.value, plan.verdict.metric) == ("none", "inter_bytes")
    assert "no homes save more than 0.0%" in said(plan)
    assert "0.0% fewer bytes between nodes than contiguous, standard" in said(plan)


def test_placement_and_homes_together_save_more_than_either_alone(tmp_path: Path, make_trace: MakeTrace) -> None:
    trace = make_trace(samples=128, tokens=8, layers=4, top_k=1, seed=3)
    cluster = Cluster.parse("2x2")
    base = Request.of(strategy="exflow", trace=trace.path, cluster=cluster, dispatch_model="standard", time_limit_s=5)
    make(base).save(tmp_path / "base.json")
    made = solved(trace, on=tmp_path / "base.json")
    found = judged(made.plan)
    policies = [f"{name}/migrating" for name in ("oracle", "unpredicted")]
    assert [*found] == [
        "plan/migrating",
        "contiguous/standard",
        *policies,
        "base/standard",
        "contiguous/migrating",
        "dealt/standard",
    ]
    copies = {label: metrics["inter_bytes"] for label, metrics in found.items()}
    assert copies["plan/migrating"] < min(copies["base/standard"], copies["contiguous/migrating"])
    assert made.plan.verdict is not None
    assert made.plan.verdict.against == "contiguous/standard"
    assert made.plan.strategies == ("exflow", "netmoe")
    assert "the placement alone saves" in said(made.plan)
    made.save(tmp_path / "plan.json")
    assert "metrics of every contender" in certify(made.plan, trace.path, folder=tmp_path).checks


def test_the_same_request_gives_the_same_plan_and_file(make_trace: MakeTrace) -> None:
    trace = make_trace(samples=70)
    one, two = solved(trace), solved(trace)
    assert one.plan.plan_sha256 == two.plan.plan_sha256
    assert one.plan.evaluation == two.plan.evaluation
    assert one.sidecars == two.sidecars


def test_relabelling_the_devices_of_a_node_changes_no_figure(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0, samples=64)
    swapped = [2, 3, 0, 1, 4, 5, 6, 7]  # experts of devices 0 and 1 of node 0, two each
    tables = [
        CountTable(sample=t.sample, layer=t.layer, counts=np.ascontiguousarray(t.counts[:, swapped]))
        for t in trace.tables()
    ]
    write_counts(tmp_path / "swapped", trace.meta, tables)
    one, two = (judged(solved(t).plan) for t in (trace, read_counts(tmp_path / "swapped")))
    for label in ("plan/migrating", "oracle/migrating"):
        assert one[label]["inter_bytes"] == pytest.approx(two[label]["inter_bytes"], rel=2e-3)  # the fit's rounding


def test_gpt_oss_saves_something_and_says_so(gpt_oss: Path, tmp_path: Path) -> None:
    import_trace(gpt_oss, tmp_path / "trace", hidden_size=2880, dtype_bytes=2)
    found = judged(solved(open_any(tmp_path / "trace"), "2x4").plan)
    base, plan, oracle = (
        found[label]["inter_bytes"] for label in ("contiguous/standard", "plan/migrating", "oracle/migrating")
    )
    assert 1 - plan / base == pytest.approx(0.064, abs=0.01)
    assert 1 - oracle / base == pytest.approx(0.071, abs=0.01)
    shutil.rmtree(tmp_path / "trace")


def test_a_cluster_that_the_placement_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(MoeplanError, match="1x3: 3 devices do not divide 8 experts, and counts do not say") as caught:
        solved(generated(tmp_path / "trace", alpha=3.0, samples=20), "1x3")
    assert "\n" not in str(caught.value)


def test_where_a_device_is_dead_today_and_experts_in_order_leave_it_out_and_the_screen_says_so(
    make_trace: MakeTrace, tmp_path: Path
) -> None:
    trace, base = make_trace(samples=70, tokens=5), tmp_path / "base.json"
    asked: dict[str, Any] = {"trace": trace.path, "cluster": Cluster(1, 4)}
    make(Request.of(strategy="eplb", dead=(1,), slots=3, **asked)).save(base)
    made = make(Request.of(strategy="netmoe", on=base, **asked))
    made.save(tmp_path / "plan.json")
    assert made.plan.verdict is not None
    assert made.plan.verdict.against == "contiguous without 1/standard"
    assert "re-homing alone" in said(made.plan)
    own = next(one for one in made.plan.evaluation.judging.contenders if one.name == "contiguous")  # type: ignore[union-attr]
    usual = find(made.plan.evaluation.judging, made.plan.verdict.against)  # type: ignore[union-attr]
    assert own.metrics["balance"].value == pytest.approx(usual.metrics["balance"].value)
    assert "verdict" in certify(made.plan, trace.path, folder=tmp_path).checks
