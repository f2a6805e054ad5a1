"""NetMoE as a strategy: exchanges against a token-by-token twin, Figure 2, the ablation, ways to deal, real data."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.errors import MoeplanError
from moeplan.planner.certify import certify
from moeplan.planner.measures.speeds import Speeds
from moeplan.planner.measures.survey import Cohort
from moeplan.planner.netmoe.counted import SampleTraffic, count_samples
from moeplan.planner.netmoe.online import Movers, deal, rehome
from moeplan.planner.netmoe.report import sample_policy_lines
from moeplan.planner.netmoe.roll import Roll, call_roll
from moeplan.planner.netmoe.tallied import tallied
from moeplan.planner.reports.remarks import remarks
from moeplan.planner.request import Request
from moeplan.planner.solve import make
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Plan
from moeplan.solvers import contiguous
from moeplan.solvers.seconds import exchange_seconds, slowest
from moeplan.traces.count_form import CountTable, open_any, read_counts, write_counts
from moeplan.traces.importers import import_trace
from moeplan.traces.reader import Trace
from tests.planner.edits import edited
from tests.planner.netmoe.made import generated, judged, part_of, solved

MakeTrace = Callable[..., Trace]
FIG_2 = np.array([[0, 0, 3, 1], [1, 2, 1, 0], [1, 1, 0, 2], [3, 0, 0, 1]])  # expert i is on device i


def remarks_of(plan: Plan) -> list[str]:
    return list(remarks(plan, part_of(plan)))


def test_figure_2_leaves_2_of_5_tokens_a_node_to_cross() -> None:
    cluster = Cluster(2, 2)
    traffic = SampleTraffic.empty(contiguous.solve(1, 4, cluster).placement, 4, cluster, linked=False)
    traffic.copies[:, 0] = FIG_2
    who, step = np.arange(4), np.zeros(4, int)
    found = rehome("sum", Movers(traffic, who, who, step), cluster, predict=lambda *_: None, copy_bytes=None)
    roll = Roll(who, None, None, FIG_2.sum(axis=1), FIG_2.sum(axis=1))
    cohort = Cohort(who, roll.tokens, who, step, None, 1, 0)
    ports = tallied(roll, traffic, who, cohort, found.device, cluster).ports
    assert ports is not None
    assert ports.dispatch[0, 0, 1, 0].reshape(2, 2).sum(axis=1).tolist() == [5, 5]
    assert ports.combine[0, 0, 1, 1].reshape(2, 2).sum(axis=1).tolist() == [2, 2]


def test_without_moves_its_baseline_is_that_of_placement_strategies(make_trace: MakeTrace) -> None:
    trace = make_trace(samples=64, tokens=7, unrouted=0.05)
    links = ("intra=100:2", "inter=10:5")
    options: dict[str, Any] = {"fit_fraction": 1.0, "samples_per_step": 16}
    ours = judged(solved(trace, links=links, **options).plan)["contiguous/standard"]
    request = Request(strategy="contiguous", trace=trace.path, cluster=Cluster.parse("2x2", links), **options)
    theirs = judged(make(request).plan)["contiguous/standard"]
    shared = set(ours) & set(theirs)
    assert {"device_copies", "node_copies", "inter_bytes", "intra_bytes", "balance", "dispatch_s", "combine_s"} < shared
    for name in shared:
        assert ours[name] == pytest.approx(theirs[name]), name
    assert ours["samples_moved"] == 0


@pytest.mark.parametrize("method", ["sum", "bottleneck", "paper"])
def test_exchanges_are_those_of_tokens_that_follow_their_samples(make_trace: MakeTrace, method: str) -> None:
    trace = make_trace(samples=16, tokens=6)
    cluster = Cluster(2, 2)
    roll = call_roll(trace)
    counted = count_samples(trace, roll, roll.tokens > 0, {"plan": contiguous.solve(3, 8, cluster).placement}, cluster)
    cohort = roll.cohort(np.arange(16), num_devices=4, samples_per_step=8)
    assert cohort.home is not None
    assert cohort.step is not None
    homes = rehome(
        method,
        Movers(counted.traffic["plan"], np.arange(16), cohort.home, cohort.step),
        cluster,
        predict=lambda *_: None,
        copy_bytes=None,
    )
    tally = tallied(roll, counted.traffic["plan"], np.arange(16), cohort, homes.device, cluster)
    assert tally.ports is not None
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
    np.testing.assert_array_equal(tally.counts[:, 4], copies)
    np.testing.assert_array_equal(tally.counts[:, 6], far)
    np.testing.assert_array_equal(tally.ports.dispatch, dispatch)
    np.testing.assert_array_equal(tally.ports.combine, combine)
    assert all(np.bincount(at[cohort.step == s], minlength=4).max() == 2 for at in homes.device for s in (0, 1))


def test_prediction_closes_in_on_the_oracle(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0)
    found = {label: metrics["inter_bytes"] for label, metrics in judged(solved(trace).plan).items()}
    oracle, plan, none, base = (
        found[label] for label in ("oracle/migrating", "plan/migrating", "unpredicted/migrating", "contiguous/standard")
    )
    assert oracle <= plan < none < base
    assert plan - oracle < 0.1 * (none - oracle)


def test_unpredicted_is_what_the_papers_method_plans(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0, samples=96)
    sample, paper = (judged(solved(trace, method=method).plan) for method in ("sum", "paper"))
    assert sample["unpredicted/migrating"] == paper["plan/migrating"]
    assert "unpredicted/migrating" not in paper


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("method", ["sum", "even"])
def test_a_global_frequency_changes_no_home(tmp_path: Path, method: str, uneven: bool) -> None:
    """What every device gets at the next layer is counted one by one, for all fitted samples together."""
    trace, cluster = generated(tmp_path / "trace", alpha=3.0, samples=64, uneven=uneven), Cluster(2, 2)
    roll = call_roll(trace)
    placements = {"plan": contiguous.solve(3, 8, cluster).placement}
    counted = count_samples(trace, roll, roll.tokens > 0, placements, cluster)
    frequency: list[list[int]] = [[0] * 4 for _ in range(3)]
    for table in trace.tables():
        for layer, counts in zip(table.layer.tolist(), table.counts.tolist(), strict=True):
            for expert, count in enumerate(counts):
                frequency[layer][expert // 2] += count

    def globally(layer: int, at: np.ndarray) -> np.ndarray | None:
        return None if layer == 2 else np.tile(np.array(frequency[layer + 1]) / 64, (len(at), 1))

    who = np.arange(64)
    movers = Movers(counted.traffic["plan"], who, who % 4, who // 16)
    blind, frequent = (
        rehome(method, movers, cluster, predict=predict, copy_bytes=None) for predict in (lambda *_: None, globally)
    )
    np.testing.assert_array_equal(blind.device, frequent.device)
    assert (blind.device[1:] != blind.device[:-1]).any()


def test_the_method_that_is_fastest_on_the_fitted_steps_is_taken_where_exchanges_are_timed(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=40.0, samples=192, uneven=True)
    links = ("intra=100:2", "inter=10:5")
    chosen, plain = (solved(trace, links=links, method=method).plan for method in (None, "sum"))
    assert chosen.decisions.sample_policy is not None
    assert chosen.decisions.sample_policy.method == "bottleneck"
    fastest, summed = (
        found["dispatch_s"] + found["combine_s"]
        for found in (judged(plan)["plan/migrating"] for plan in (chosen, plain))
    )
    assert fastest < summed
    tried_s = chosen.options["sample_policy"]["tried_s"]
    assert tried_s["bottleneck"] < tried_s["even"] < tried_s["sum"]
    assert any(line.startswith("tried") for line in sample_policy_lines(chosen, part_of(chosen)))
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
    roll, model = call_roll(trace), trace.meta.model
    placements = {"plan": contiguous.solve(3, 8, cluster).placement}
    traffic = count_samples(trace, roll, roll.tokens > 0, placements, cluster).traffic["plan"]
    cohort = roll.cohort(np.arange(48), num_devices=4, samples_per_step=16)
    assert cohort.home is not None
    assert cohort.step is not None

    def known(layer: int, at: np.ndarray) -> np.ndarray | None:
        return None if layer == 2 else traffic.copies[at, layer + 1].astype(float)

    movers = Movers(traffic, np.arange(48), cohort.home, cohort.step)
    homes = rehome("bottleneck", movers, cluster, predict=known, copy_bytes=128.0)
    ports = tallied(roll, traffic, np.arange(48), cohort, homes.device, cluster).ports
    speeds = Speeds.of(None, cluster, model, samples=True)
    assert ports is not None
    assert speeds is not None
    assert speeds.exchange is not None
    dispatch, combine = (
        slowest(exchange_seconds(copies, 128.0, speeds.exchange)).seconds for copies in (ports.dispatch, ports.combine)
    )
    assert homes.totals.name == "exchange_s"
    assert homes.totals.value == pytest.approx(combine.sum() + dispatch[:, 1:].sum(), rel=1e-12)
    assert 0.8 * homes.totals.value < homes.totals.bound <= homes.totals.value


def test_even_gives_every_device_one_of_each_round(tmp_path: Path) -> None:
    cluster, rng = Cluster(2, 2), np.random.default_rng(0)
    traffic = SampleTraffic.empty(contiguous.solve(2, 8, cluster).placement, 10, cluster, linked=False)
    length = rng.permutation(10) + 1
    traffic.copies[:] = rng.multinomial(length[:, None] * 20, [0.25] * 4, (10, 2))
    who = np.arange(10)
    movers = Movers(traffic, who, who % 4, who * 0)
    homes = rehome("even", movers, cluster, predict=lambda *_: None, copy_bytes=None).device
    for first in (10, 6, 2):
        devices = homes[1:, (length <= first) & (length > first - 4)]
        assert all(len(set(row)) == len(row) for row in devices.tolist())


def test_dealt_gives_the_longest_sample_that_is_left_to_the_device_with_fewest_tokens() -> None:
    length, home, step = np.array([9, 1, 8, 2, 7, 3, 5]), np.full(7, 2), np.array([0, 0, 0, 0, 0, 0, -1])
    assert deal(length, home, step, 3).tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert deal(length[:5], home[:5], step[:5], 2).tolist() == [0, 0, 1, 0, 1]


@pytest.mark.parametrize("uneven", [False, True])
def test_what_dealing_by_length_gives_stands_below_a_verdict_on_seconds(tmp_path: Path, uneven: bool) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0 if not uneven else 400.0, samples=160, uneven=uneven)
    plan = solved(trace, links=("intra=100:2", "inter=10:5")).plan
    found, (first, *rest) = judged(plan), remarks_of(plan)
    dealt, base = (found[label]["exchange_s"] for label in ("dealt/standard", "contiguous/standard"))
    assert f"of this, dealing samples by length alone gives {1 - dealt / base:z.1%}" in "\n".join([first, *rest])
    over = plan.options["sample_policy"]["over_dealt"]
    assert over["value"] == pytest.approx(dealt - found["plan/migrating"]["exchange_s"])
    assert ("DEALING BY LENGTH DOES AS WELL" in "\n".join(rest)) == (over["low"] <= 0.02 * dealt)
    for low, told in ((0.0199, True), (0.0201, False)):
        lines = remarks_of(edited(plan, "options.sample_policy.over_dealt.low", low * dealt))
        assert any("DEALING BY LENGTH DOES AS WELL" in line for line in lines) == told


def test_a_verdict_on_bytes_says_nothing_of_dealing_by_length(tmp_path: Path) -> None:
    lines = remarks_of(solved(generated(tmp_path / "trace", alpha=3.0, samples=160)).plan)
    assert not any("by length" in line for line in lines)


def test_a_gain_above_2_percent_whose_lower_end_is_under_it_may_be_under_2_percent(tmp_path: Path) -> None:
    plan = solved(generated(tmp_path / "trace", alpha=3.0, samples=160)).plan
    assert plan.verdict is not None
    base = judged(plan)["contiguous/standard"]["inter_bytes"]
    for value, told in ((0.03, "; may be under 2%, which does not pay"), (0.015, "; under 2% does not pay")):
        gain = {"value": value * base, "low": 0.01 * base, "high": 0.04 * base}
        none = edited(edited(plan, "verdict.gain", gain), "verdict.value", "none")
        assert any(told in line for line in remarks_of(none))


def test_few_steps_are_told(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0, samples=160)
    plans = [solved(trace, samples_per_step=size).plan for size in (16, 4)]
    steps = [part_of(plan).num_steps for plan in plans]
    assert steps[0] < 10 < steps[1]
    told = [f"judged on {steps[0]} steps, which are few" in "\n".join(remarks_of(plan)) for plan in plans]
    assert told == [True, False]


def test_no_way_to_deal_samples_beats_the_bound_of_another(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0, samples=96, uneven=True)
    found = [solved(trace, method=method).plan.outcome["sample_policy"] for method in ("sum", "even")]
    values, bounds = [one.objective.value for one in found], [one.bound for one in found]
    assert bounds[0] is not None
    assert bounds[1] == pytest.approx(bounds[0], rel=1e-9)
    assert bounds[0] <= values[0] * (1 + 1e-9)
    assert values[0] < 0.9 * values[1]
    assert found[1].status == "feasible"


@pytest.mark.parametrize(("seconds", "told"), [(1.25, "COSTS TIME: .* take 25.0% longer"), (0.75, "25.0% less time")])
def test_exchanges_that_take_longer_cost_time_and_shorter_ones_less(tmp_path: Path, seconds: float, told: str) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0, samples=64)
    plan = solved(trace, links=("intra=100:2", "inter=10:5"), method="sum").plan
    base = judged(plan)["contiguous/standard"]["exchange_s"]
    part = part_of(edited(plan, "evaluation.held_out.contenders.0.metrics.exchange_s.value", seconds * base))
    assert re.search(told, list(sample_policy_lines(plan, part))[-1])


def test_samples_that_are_all_alike_have_no_locality_and_no_benefit(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0)
    table = next(trace.tables())
    alike = CountTable(sample=table.sample, layer=table.layer, counts=np.full_like(table.counts, 64))
    write_counts(tmp_path / "alike", trace.meta, [alike])
    plan = solved(read_counts(tmp_path / "alike")).plan
    assert plan.verdict is not None
    assert (plan.verdict.value, plan.verdict.metric) == ("none", "inter_bytes")
    lines = list(sample_policy_lines(plan, part_of(plan)))
    assert "save more than 0.0%" in lines[0]
    assert "saved     0.0%" in lines[1]


def test_placement_and_homes_together_save_more_than_either_alone(tmp_path: Path, make_trace: MakeTrace) -> None:
    trace = make_trace(samples=128, tokens=8, layers=4, top_k=1, seed=3)
    cluster = Cluster.parse("2x2")
    base = Request(strategy="exflow", trace=trace.path, cluster=cluster, dispatch_model="standard", time_limit_s=5)
    make(base).save(tmp_path / "base.json")
    made = solved(trace, on=tmp_path / "base.json")
    found = judged(made.plan)
    policies, still = (
        ("plan", "oracle", "unpredicted"),
        ("base/standard", "contiguous/migrating", "dealt/standard", "contiguous/standard"),
    )
    assert list(found) == [*(f"{name}/migrating" for name in policies), *still]
    copies = {label: metrics["inter_bytes"] for label, metrics in found.items()}
    assert copies["plan/migrating"] < min(copies["base/standard"], copies["contiguous/migrating"])
    assert made.plan.verdict is not None
    assert made.plan.verdict.against == "base/standard"
    assert made.plan.strategies == ("exflow", "netmoe")
    assert any(line.startswith("jointly") for line in sample_policy_lines(made.plan, part_of(made.plan)))
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
