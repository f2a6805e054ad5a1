"""FlexMoE as a strategy: what it decides from steps in order, what the evaluator makes of placements that change."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.errors import CertificationError, InputError, UsageError
from moeplan.planner.certify import certify
from moeplan.planner.compare import compare
from moeplan.planner.evaluate.choosers import step_pairs
from moeplan.planner.evaluate.journey import Journey
from moeplan.planner.evaluate.price import price
from moeplan.planner.evaluate.replay import replay
from moeplan.planner.evaluate.scene import Passes
from moeplan.planner.evaluate.tally import Tally
from moeplan.planner.solve import solve, task_for
from moeplan.planner.strategies.flexmoe.rates import rates
from moeplan.planner.strategies.flexmoe.strategy import filled
from moeplan.planner.strategies.flexmoe.timeline import timeline_picture, trace_events, write_timeline
from moeplan.planner.strategies.registry import strategy
from moeplan.planner.strategies.strategy import sidecar
from moeplan.runtime.active import load_plan
from moeplan.runtime.plan import load
from moeplan.runtime.rebalancing import policy_of, tables_of
from moeplan.runtime.schedule import KINDS, Schedule
from moeplan.runtime.schedule import schedule_of as tables_by_step
from moeplan.solvers.flexmoe import Stay, follow
from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.traces.count_form import CountTable, CountTrace, read_counts, write_counts
from moeplan.traces.reader import Trace
from moeplan.traces.schema import PHASES, TokenBatch
from tests.builders import known, meta_of, model
from tests.planner.makers import (
    assert_refused,
    edited,
    judged,
    made,
    request,
    said,
    scene_of,
    stored,
    stored_tokens,
    write_profile,
)

Pairs = NDArray[np.int64]
LAYERS, EXPERTS, STEPS = 2, 8, 24
SIZES: dict[str, Any] = {"hidden_size": 64, "ffn_size": 128, "dtype_bytes": 2, "top_k": 1}


def drifting(devices: int = 4, steps: int = STEPS, seed: int = 0) -> Pairs:
    """Pairs `[B, L, E, D]` of a training run whose popular experts change."""
    rng = np.random.default_rng(seed)
    logits, pairs = rng.normal(0, 1.5, (LAYERS, EXPERTS)), np.zeros((steps, LAYERS, EXPERTS, devices), np.int64)
    for step, layer in np.ndindex(steps, LAYERS):
        logits[layer] += rng.normal(0, 0.25, EXPERTS)
        share = np.exp(logits[layer])
        pairs[step, layer] = rng.multinomial(400, share / share.sum(), devices).T
    return pairs


def counted_run(
    folder: Path, pairs: Pairs, *, every: int = 1, at: Any = None, ranked: bool = True, **meta: Any
) -> CountTrace:
    """A trace of these counts, of steps so far apart, or of these steps, by source rank or not."""
    number = np.array(at if at is not None else range(1, 1 + every * len(pairs), every), np.int32)
    step, rank, layer = (axis.ravel() for axis in np.indices((pairs.shape[0], pairs.shape[3], pairs.shape[1])))
    table = CountTable(
        step=number[step],
        source_rank=rank.astype(np.int32) if ranked else None,
        layer=layer.astype(np.int32),
        counts=pairs[step, layer, :, rank],
    )
    write_counts(folder, meta_of(model(LAYERS, EXPERTS, **SIZES), form="counts", **meta), [table])
    return read_counts(folder)


def token_run(folder: Path, pairs: Pairs, every: int = 10, *, ranked: bool = True, sampled: bool = True) -> Trace:
    """The same run token by token: a token a pair, which takes one expert in every layer."""
    batches = []
    for step, of_step in enumerate(pairs):
        for rank in range(pairs.shape[3]):
            ids = np.stack([np.repeat(np.arange(EXPERTS), of_step[layer, :, rank]) for layer in range(LAYERS)], axis=1)
            number = len(ids)
            batches.append(
                TokenBatch(
                    step=np.full(number, 1 + every * step, np.int32),
                    sample=np.full(number, step * pairs.shape[3] + rank, np.int64) if sampled else None,
                    position=np.arange(number, dtype=np.int32),
                    source_rank=np.full(number, rank, np.int32) if ranked else None,
                    phase=np.full(number, PHASES.index("train"), np.int8),
                    ids=ids[:, :, None].astype(np.uint16),
                    weights=None,
                )
            )
    return stored_tokens(folder, model(LAYERS, EXPERTS, **SIZES), *batches)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_profile(tmp_path_factory.mktemp("profile") / "p.json", "2x2", noise=0.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> CountTrace:
    return counted_run(tmp_path_factory.mktemp("run") / "t", drifting(), every=10)


@pytest.fixture(scope="module")
def solved(run: CountTrace, profile: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of the run, with its schedule beside it."""
    folder = tmp_path_factory.mktemp("plan")
    made(run, "flexmoe", profile=profile, slots=3, purpose="training", to=folder / "plan.json")
    return folder / "plan.json"


@pytest.fixture(scope="module")
def plan(solved: Path) -> Any:
    return load(solved)


def schedule_of(solved: Path, plan: Any) -> Schedule:
    return Schedule.beside(plan, solved.parent)


def test_a_plan_follows_the_load_better_than_its_own_start_and_is_certified(
    solved: Path, plan: Any, run: CountTrace, profile: Path
) -> None:
    found = judged(plan)
    ours, static, today = (found[f"{name}/standard"] for name in ("plan", "static", "contiguous"))
    assert ours["step_s"] < static["step_s"] < today["step_s"]
    assert plan.verdict.value == "benefit"
    assert plan.options["rebalancing"]["followed"]["plan"]["violations"] == 0
    certificate = certify(plan, run.path, profile, folder=solved.parent)
    assert "objective, schedule and what the policy did" in certificate.checks
    assert certificate.replayed


def test_earlier_steps_are_fitted_and_later_ones_judge(solved: Path, plan: Any) -> None:
    assert plan.evaluation.fit.num_steps == plan.evaluation.held_out.num_steps == STEPS // 2
    assert schedule_of(solved, plan).steps.tolist() == [1 + 10 * step for step in range(STEPS // 2, STEPS)]
    assert plan.options["evaluation"]["use"] == "training"


def replayed(plan: Any, schedule: Schedule, pairs: Pairs) -> NDArray[np.float64]:
    """Max/mean load of every step and layer, `[B, L]`, when the schedule is carried out by hand and a step is split by
    the bound of Hall: no split is better, and the plan's must be as good.
    """
    start = plan.decisions.rebalancing.start
    devices, width = pairs.shape[3], start.slots_per_device
    held = [[{*row[d * width : (d + 1) * width]} for d in range(devices)] for row in start.physical_to_logical]
    ratios = np.zeros((len(pairs), LAYERS))
    for number, step in enumerate(schedule.steps.tolist()):
        for at, layer, kind, expert, source, target in schedule.operations.tolist():
            if at != step:
                continue
            if KINDS[kind] in ("shrink", "migrate"):
                held[layer][source].remove(expert)
            if KINDS[kind] in ("expand", "migrate"):
                assert expert not in held[layer][target]
                held[layer][target].add(expert)
        for layer in range(pairs.shape[1]):
            assert max(map(len, held[layer])) <= width
            load = pairs[number, layer].sum(axis=1)
            worst = max(
                -(-int(sum(load[e] for e in range(EXPERTS) if not any(e in held[layer][d] for d in others))) // few)
                for mask in range(1, 2**devices)
                if (few := mask.bit_count())
                for others in [[d for d in range(devices) if not mask >> d & 1]]
            )
            ratios[number, layer] = worst * devices / load.sum()
    return ratios


def test_the_schedule_carried_out_by_hand_gives_the_balance_that_the_plan_tells(solved: Path, plan: Any) -> None:
    schedule, later = schedule_of(solved, plan), drifting()[STEPS // 2 :]
    ratios = replayed(plan, schedule, later)
    assert len(schedule.operations)
    assert judged(plan)["plan/standard"]["balance"] == pytest.approx(ratios.mean())
    assert np.allclose(schedule.balance["plan"], ratios)


def test_the_schedule_as_tables_is_what_the_evaluation_held_at_every_step(solved: Path, plan: Any) -> None:
    rule, costs = policy_of(plan.decisions.rebalancing)
    start, records = tables_of(plan.placement), drifting()[STEPS // 2 :, :, None]
    run = follow(records, start, rule, costs, group=2, steps=10)
    tables, held = tables_by_step(load_plan(solved)), start
    for record, step in enumerate(schedule_of(solved, plan).steps.tolist()):
        held = tables.get(step, held)
        assert (np.sort(held, axis=2) == np.sort(run.tables[run.period[record]], axis=2)).all()
    assert len(tables) == len({one.record for one in run.operations}) > 2


def test_operations_without_a_slot_are_refused(plan: Any) -> None:
    start = tables_of(plan.placement)
    held, absent = start[0, 1, 0], np.setdiff1d(np.arange(EXPERTS), start[0, 1])[0]
    for row in ([3, 0, 0, absent, 0, 1], [3, 0, 1, absent, 1, -1], [3, 0, 2, held, 1, 1]):
        schedule = Schedule(np.array([3]), np.array([row]), {})
        if row[2] != 2:
            with pytest.raises(InputError, match=f"step 3, layer 0: no slot of device 1 for .* expert {absent};"):
                schedule.tables(start)
        else:
            assert (schedule.tables(start)[3] == start).all()


def test_tokens_tell_what_their_counts_tell(tmp_path: Path, profile: Path, plan: Any) -> None:
    trace = token_run(tmp_path / "t", drifting())
    of_tokens: Any = made(trace, "flexmoe", profile=profile, slots=3, to=tmp_path / "plan.json").plan
    assert of_tokens.decisions.rebalancing.start == plan.decisions.rebalancing.start
    ours, theirs = judged(of_tokens), judged(plan)
    for label in ("plan/standard", "static/standard", "contiguous/standard"):
        for name in ("balance", "moe_s", "sums_s", "moves_s", "bytes_migrated"):
            if name in theirs[label]:
                assert ours[label][name] == pytest.approx(theirs[label][name]), (label, name)
    assert certify(of_tokens, trace.path, profile, folder=tmp_path).replayed


def test_moves_weigh_less_where_a_recorded_step_stands_for_several(tmp_path: Path, profile: Path) -> None:
    some, ten_times = (
        made(
            counted_run(tmp_path / str(every), drifting(), every=every),
            "flexmoe",
            profile=profile,
            slots=3,
            method="paper",
        ).plan
        for every in (3, 30)  # decisions of both hold from the next record on
    )
    assert ten_times.decisions.rebalancing.record_steps == 30
    (ours, theirs) = (judged(one)["plan/standard"] for one in (ten_times, some))
    assert theirs["bytes_migrated"] > 0
    assert ours["bytes_migrated"] == pytest.approx(theirs["bytes_migrated"] / 10)
    assert ours["moves_s"] == pytest.approx(theirs["moves_s"] / 10)


def test_without_seconds_balance_alone_decides(tmp_path: Path) -> None:
    trace = counted_run(tmp_path / "t", drifting(), ranked=False)
    plan: Any = made(trace, "flexmoe", "2x2", to=tmp_path / "plan.json").plan
    assert plan.verdict.metric == "balance"
    assert plan.decisions.rebalancing.evaluations == 0
    assert {name.split()[0] for name in plan.options["rebalancing"]["tried"]} == {"3", "4"}
    assert judged(plan)["plan/standard"]["balance"] < 1.02 < judged(plan)["contiguous/standard"]["balance"]
    assert certify(plan, trace.path, folder=tmp_path).replayed
    assert "decided by balance alone" in said(plan)


@pytest.mark.parametrize("timed", [True, False])
def test_a_plan_for_a_quantile_of_steps_is_judged_by_it_and_certified(
    tmp_path: Path, run: CountTrace, profile: Path, timed: bool
) -> None:
    measured = profile if timed else None
    plan: Any = made(run, "flexmoe", "2x2", profile=measured, slots=3, quantile=0.75, to=tmp_path / "plan.json").plan
    assert plan.decisions.rebalancing.quantile == 0.75
    assert policy_of(plan.decisions.rebalancing)[0].quantile == 0.75  # type: ignore[attr-defined]
    options = plan.options["rebalancing"]
    assert options["followed"]["plan"]["violations"] == 0
    start, records = tables_of(plan.placement), drifting()[STEPS // 2 :, :, None]
    static = follow(records, start, Stay(), policy_of(plan.decisions.rebalancing)[1], group=2, steps=10)
    figures = static.seconds.sum(axis=2) if timed else static.balance
    expected = np.quantile(figures.mean(axis=1), 0.75, method="higher")
    assert options["followed"]["static"]["figure"] == pytest.approx(expected)
    assert f"{'layer' if timed else 'balance'}, p75" in said(plan)
    assert certify(plan, run.path, measured, folder=tmp_path).replayed


def test_replicas_stay_where_loads_differ_by_chance_alone(tmp_path: Path, profile: Path) -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(EXPERTS, 0.5), LAYERS)
    pairs = np.array([[rng.multinomial(40, share, 4).T for share in shares] for _ in range(2 * STEPS)])
    trace = counted_run(tmp_path / "t", pairs)
    plan: Any = made(trace, "flexmoe", profile=profile, slots=3, horizon=300, to=tmp_path / "plan.json").plan
    tried, found = plan.options["rebalancing"]["tried"], judged(plan)
    assert plan.decisions.rebalancing.stays
    assert min(tried, key=tried.get) == "3 slots, kept"
    assert [name.removeprefix("3 slots, ") for name in tried] == [
        "300 steps",
        "300 steps, 8 records",
        "300 steps, 12 records",
        "kept",
    ]
    assert found["plan/standard"]["step_s"] == found["static/standard"]["step_s"]
    assert "replicas stay: every policy that was tried took longer" in said(plan)
    assert certify(plan, trace.path, profile, folder=tmp_path).replayed


def test_another_run_is_compared_by_the_policy_and_not_by_the_schedule(
    tmp_path: Path, solved: Path, profile: Path, run: CountTrace
) -> None:
    other = counted_run(tmp_path / "t", drifting(seed=5))
    comparison = compare([solved], other.path, profile=profile)
    rows = {one.name: one.metrics for one in comparison.part.contenders}
    assert rows[str(solved)]["balance"].value < rows[f"{solved}, replicas staying"]["balance"].value
    assert comparison.part.num_steps == STEPS
    again = compare([solved], run.path, profile=profile)
    assert again.part.num_steps == STEPS // 2


@pytest.mark.parametrize("cluster", ["1x4", "4x1"])
@pytest.mark.parametrize("method", ["search", "paper"])
def test_any_shape_of_cluster_and_either_method_is_certified(
    tmp_path: Path, run: CountTrace, cluster: str, method: str
) -> None:
    """A link of one class alone; the paper's changes need not pay."""
    profile = write_profile(tmp_path / "p.json", cluster, noise=0.0)
    plan: Any = made(run, "flexmoe", profile=profile, slots=3, method=method, to=tmp_path / "plan.json").plan
    certificate = certify(plan, run.path, profile, folder=tmp_path)
    assert "predicted seconds" in certificate.checks
    assert certify(plan, run.path, folder=tmp_path).replayed
    assert plan.decisions.rebalancing.method == method


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_few_steps_are_planned_for(tmp_path: Path, profile: Path, steps: int) -> None:
    trace = counted_run(tmp_path / "t", drifting(steps=steps))
    plan: Any = made(trace, "flexmoe", profile=profile, slots=3, to=tmp_path / "plan.json").plan
    assert (plan.evaluation.held_out is None) == (steps == 1)
    assert certify(plan, trace.path, profile, folder=tmp_path).replayed


def test_pairs_that_are_counted_are_not_counted_again_for_the_part_that_judges(run: CountTrace) -> None:
    task = task_for(request(run, "flexmoe", "2x2"))
    counted = step_pairs(task.scene)
    ((_, judging),) = task.judging_scenes
    assert step_pairs(judging)[0] is counted[-1] is not counted[0]


def test_a_layer_without_tokens_is_even(tmp_path: Path, profile: Path) -> None:
    pairs = drifting()
    pairs[:, 1] = 0
    trace = counted_run(tmp_path / "t", pairs)
    made(trace, "flexmoe", profile=profile, slots=3, to=tmp_path / "plan.json")
    plan = load(tmp_path / "plan.json")
    balance = schedule_of(tmp_path / "plan.json", plan).balance["plan"]
    assert (balance[:, 1] == 1).all()
    lines = [*timeline_picture(plan, 1, 80, tmp_path)]
    assert lines[0].startswith("layer 1")
    (even,) = (line for line in lines if line.startswith("even at every step"))
    assert even.partition(": ")[2].split(", ")[0] == "plan"
    assert not [line for line in lines if line.startswith("plan ")]


def test_steps_at_unequal_distances_stand_for_their_mean(tmp_path: Path, profile: Path) -> None:
    every = [1, 2, 3, 40]  # 39 steps in 3 distances
    pairs = drifting(steps=4)
    trace = counted_run(tmp_path / "t", pairs, at=every)
    plan: Any = made(trace, "flexmoe", profile=profile, slots=3).plan
    assert plan.decisions.rebalancing.record_steps == 13


@pytest.mark.parametrize("rule", ["even", "lp", "quota"])
def test_counts_by_rank_time_exchanges_of_placements_that_stay(
    tmp_path: Path, run: CountTrace, profile: Path, rule: str
) -> None:
    plan: Any = made(run, "eplb", profile=profile, redundant=4, replica_rule=rule, to=tmp_path / "plan.json").plan
    assert judged(plan)["plan/standard"]["exchange_s"] > 0
    assert plan.verdict.metric == "step_s"
    assert certify(plan, run.path, profile, folder=tmp_path).replayed


def test_in_training_replicas_pay_for_gradient_sums(tmp_path: Path, run: CountTrace, profile: Path) -> None:
    asked: dict[str, Any] = {"profile": profile, "redundant": 4}
    serving, training = (made(run, "eplb", purpose=purpose, **asked).plan for purpose in (None, "training"))
    assert "sums_s" not in judged(serving)["plan/standard"]
    ours = judged(training)
    assert ours["plan/standard"]["sums_s"] > 0 == ours["contiguous/standard"]["sums_s"]


def test_samples_are_dealt_over_devices_where_no_rank_is_known(tmp_path: Path, profile: Path, plan: Any) -> None:
    trace = token_run(tmp_path / "t", drifting(), ranked=False)  # sample s of a step came from device s mod D
    dealt: Any = made(trace, "flexmoe", profile=profile, slots=3).plan
    assert judged(dealt)["plan/standard"]["moe_s"] == pytest.approx(judged(plan)["plan/standard"]["moe_s"])


def test_tokens_without_samples_and_with_other_ranks_are_refused(tmp_path: Path) -> None:
    trace = token_run(tmp_path / "t", drifting(devices=2, steps=4), sampled=False)
    with pytest.raises(UsageError, match="2 source ranks were recorded for 4 devices"):
        made(trace, "flexmoe", "2x2")


def test_a_timeline_shows_every_rule_and_the_changes(solved: Path, plan: Any, tmp_path: Path) -> None:
    lines = [*timeline_picture(plan, 0, 100, solved.parent)]
    assert [line.split(" ")[0] for line in lines[2:4]] == ["plan", "eplb"]
    assert max(map(len, lines)) <= 100
    events = trace_events(plan, 0, solved.parent)
    assert f"{len(events)} |" in lines[-1]
    assert {one["kind"] for one in events} <= {*KINDS}
    write_timeline(plan, 0, tmp_path / "layer.html", solved.parent)
    assert "busiest device over the mean" in (tmp_path / "layer.html").read_text()
    with pytest.raises(UsageError, match="expected an MoE layer, 0 to 1"):
        [*timeline_picture(plan, 2, 100, solved.parent)]


def test_replicas_follow_the_load_of_layers_in_chunks(tmp_path: Path, run: CountTrace, profile: Path) -> None:
    trace = token_run(tmp_path / "t", drifting())
    made(trace, "pipemoe", profile=profile, purpose="training", max_degree=2, to=tmp_path / "piped.json")
    asked: dict[str, Any] = {"profile": profile, "slots": 3, "to": tmp_path / "plan.json"}
    plan: Any = made(trace, "flexmoe", on=tmp_path / "piped.json", **asked).plan
    assert plan.decisions.names == ("pipeline", "rebalancing")
    found = judged(plan)
    ours, static, today = (found[f"{name}/standard"] for name in ("plan", "static", "contiguous"))
    assert ours["step_s"] < static["step_s"] < today["step_s"]
    whole: Any = made(trace, "flexmoe", **asked).plan
    assert ours["moe_s"] < judged(whole)["plan/standard"]["moe_s"]  # chunks overlap
    assert ours["balance"] == pytest.approx(judged(whole)["plan/standard"]["balance"])
    counted: Any = made(run, "flexmoe", on=tmp_path / "piped.json", **asked).plan
    assert judged(counted)["plan/standard"]["moe_s"] == pytest.approx(ours["moe_s"])
    assert "degrees" in certify(plan, trace.path, profile, folder=tmp_path).checks


def test_the_table_tells_every_rule(plan: Any) -> None:
    text = said(plan)
    for words in ("% of ideal", "MB moved/step", "planning", "static", "paper, all shrink", "the best other rule"):
        assert words in text


@pytest.mark.parametrize("metric", ["step_s", "ideal_step_s", "balance"])
def test_a_figure_that_was_set_to_0_is_one_line(plan: Any, metric: str) -> None:
    forged = edited(plan, f"evaluation/held_out/contenders/1/metrics/{metric}/value", 0.0)
    with pytest.raises(InputError, match=rf"^the plan's evaluation of contiguous has {metric} 0; expected above 0"):
        said(forged)


def test_rates_are_lines_through_what_is_timed(run: CountTrace, profile: Path) -> None:
    """The profile's curves are lines without noise, so that the rates are theirs."""
    scene = scene_of(run, "2x2", profile=profile, passes=Passes(2.0, full_duplex=False))
    pairs = drifting()
    found = rates(scene, pairs, 2)
    assert found is not None
    costs, fixed_s = found
    (at_mean,) = known(known(scene.costs).experts)(
        np.array([pairs.sum() / pairs[..., 0, 0].size / 4]), np.array([2.0])
    ).seconds
    assert fixed_s + costs.pair_s * pairs.sum() / pairs[..., 0, 0].size / 4 == pytest.approx(3 * at_mean, rel=0.05)
    assert costs.inter_s_per_byte > costs.intra_s_per_byte > 0
    assert costs.moved_bytes == 8 * costs.gradient_bytes
    narrow, _ = known(rates(scene, pairs, 2, "fp8"))
    assert (costs.copy_bytes, narrow.copy_bytes) == (scene.model.copy_bytes, known(scene.model.hidden_size) + 4)


def first_steps(tally: Tally, number: int) -> Tally:
    return replace(tally, loads=tally.loads[:number], ports=known(tally.ports).each(lambda one: one[:number]))


def test_sums_and_moves_are_priced_by_the_bytes_that_cross_the_busiest_port(run: CountTrace, profile: Path) -> None:
    """On 2x2: experts 0 and 1 have replicas, and one moves from device 0 to 3 before the second step."""
    scene = replace(scene_of(run, "2x2", profile=profile, passes=Passes(2.0, full_duplex=False)), paired=True)
    costs, spec = known(scene.costs), known(scene.model)
    near, far = known(costs.exchange)
    held = [[[0, 1], [0, 2, 3], [0, 4, 5], [6, 7, 1]]] * LAYERS
    widths = np.array([2, 3, 3, 3])
    table = np.array([[expert for device in layer for expert in device] for layer in held], np.int32)
    table[:, -3:] = [1, 6, 7]
    placement = Placement(table, widths, EXPERTS, ReplicaRule.QUOTA)
    journey, moves = Journey("standard", placement), np.zeros((2, LAYERS, 2, 2, 4))
    moves[1, 0, 1, 0, 0] = moves[1, 0, 1, 1, 3] = 1
    tally = replay(scene, [journey], ports=True)[0][0]
    tally = replace(first_steps(tally, 2), moves=moves)
    seconds = price(tally, journey, replace(scene, record_steps=5)).levels

    def taken(curve: Any, size: float) -> float:
        return float(curve(np.array([size]), np.array([size]), np.ones(1)).seconds[0])

    each = float(known(spec.expert_bytes))
    # Device 0 owns both. Devices 1 and 2 send each other half of expert 0, then half to 0; device 3 sends expert 1.
    among, home = taken(far, each / 2), max(taken(near, each / 2), taken(far, (1 / 2 + 1) * each))
    expected = 2 * (among + home)
    assert seconds["sums_s"][1] == pytest.approx([LAYERS * expected] * 2)
    moved = taken(far, 128 * 64 * 3 * 16) / 5
    assert seconds["moves_s"][1] == pytest.approx([0, moved])


def test_empty_slots_are_filled_with_replicas_of_the_highest_loads() -> None:
    tables = np.array([[[0, 1, -1], [2, 3, -1]]])
    assert filled(tables, np.array([[1, 2, 8, 3]]), 2).tolist() == [[[0, 1, 2], [2, 3, 1]]]


def test_on_several_nodes_those_come_first_that_no_other_node_holds() -> None:
    tables = np.array([[[0, -1], [1, 2], [2, 3], [4, 2]]])  # expert 2 has the highest load, and is on both nodes
    assert filled(tables, np.array([[1, 3, 90, 4, 5]]), 2).tolist() == [[[0, 1], [1, 2], [2, 3], [4, 2]]]


@pytest.mark.parametrize(("settings", "trials"), [({}, 7), ({"slots": 3}, 6), ({"horizon": 30.0}, 5)])
def test_progress_tells_which_trial_of_how_many_it_is(tmp_path: Path, settings: dict[str, Any], trials: int) -> None:
    told = list[str]()
    trace = counted_run(tmp_path / "t", drifting(steps=6))
    plan = solve(request(trace, "flexmoe", "2x2", **settings), on_progress=told.append)
    names = plan.options["rebalancing"]["tried"]
    expected = [f"trial {number} of {trials}: {name}, on the fitted steps" for number, name in enumerate(names, 1)]
    assert [line for line in told if line.startswith("trial")] == expected
    assert len(names) == trials


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        (0, r"^0 slots on 4 devices for 1 expert; expected at least 1 a device$"),
        (2, r"^2 slots per device for 1 expert; expected 0 to 1, since a device holds an expert once: at most 4"),
    ],
)
def test_slots_that_one_expert_cannot_fill_are_one_clear_line(tmp_path: Path, slots: int, words: str) -> None:
    trace = stored(tmp_path / "t", np.full((4, 2, 1), 9), top_k=1)
    with pytest.raises(UsageError, match=words):
        made(trace, "flexmoe", "2x2", slots=slots)


@pytest.mark.parametrize(
    ("meta", "settings", "error", "words"),
    [
        ({"step_order": "unknown"}, {}, UsageError, "no known order"),
        ({}, {"purpose": "serving"}, UsageError, "--for serving"),
        ({}, {"slots": 1}, UsageError, "expected at least 2 a device"),
        ({}, {"slots": 9}, UsageError, "a device holds"),
        ({}, {"horizon": 0.5}, UsageError, "1 step or more"),
        ({}, {"quantile": 1.5}, UsageError, "expected above 0 and at most 1"),
        ({}, {"quantile": 0.9, "method": "paper"}, UsageError, "which goes by the last step"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    tmp_path: Path, meta: dict[str, Any], settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    trace = counted_run(tmp_path / "t", drifting(steps=6), **meta)
    with pytest.raises(error, match=words):
        made(trace, "flexmoe", "2x2", **settings)


def test_counts_of_samples_without_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no steps were recorded"):
        made(stored(tmp_path / "t", drifting()[:, :, :, 0], ("sample",)), "flexmoe", "2x2")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("options/rebalancing/slots", 4, "slots per device"),
        ("options/rebalancing/followed/plan/violations", 1, "cost more"),
        ("options/rebalancing/horizon", 7.0, "was asked for"),
        ("options/rebalancing/followed/plan/changes", 99, "changes"),
        ("options/rebalancing/followed/static/figure", 1e-9, "static: figure"),
        ("decisions/rebalancing/quantile", 0.5, None),
        ("outcome/rebalancing/objective/value", 1.5, "gap|objective"),
        ("decisions/rebalancing/trigger", 3.0, None),
    ],
)
def test_an_edited_plan_is_refused(
    solved: Path, plan: Any, run: CountTrace, profile: Path, path: str, value: Any, words: str | None
) -> None:
    assert_refused(edited(plan, path, value), run.path, profile, words=words, folder=solved.parent)


def test_another_schedule_beside_the_plan_is_refused(
    tmp_path: Path, solved: Path, plan: Any, run: CountTrace, profile: Path
) -> None:
    schedule = schedule_of(solved, plan)
    schedule.operations[0, 3] = (schedule.operations[0, 3] + 1) % EXPERTS
    named, files = sidecar("schedule", schedule.to_bytes())
    for name, contents in files.items():
        (tmp_path / name).write_bytes(contents)
    forged = edited(plan, "decisions/rebalancing/schedule", json.loads(known(named).model_dump_json()))
    assert_refused(forged, run.path, profile, words="not what its rules do", folder=tmp_path)


def test_a_damaged_schedule_says_so() -> None:
    with pytest.raises(InputError, match="damaged"):
        Schedule.from_bytes(b"nothing", LAYERS)


@pytest.mark.parametrize(
    "change",
    [
        {"steps": np.zeros(0, np.int64)},
        {"balance": {}},
        {"balance": {"plan": np.full((2, LAYERS), np.nan)}},
        {"balance": {"plan": np.full((2, LAYERS), 0.5)}},
        {"operations": np.array([[1, 0, 9, 0, 0, 1]])},
        {"operations": np.zeros((1, 6))},
        {"operations": np.array([[1, -1, 0, 0, -1, 1]])},
        {"operations": np.array([[1, 0, 2, 0, -1, 1]])},
        {"operations": np.array([[1, LAYERS, 0, 0, 0, 1]])},
        {"operations": np.array([[1, 0, 0, 0, 0, 10**9 * 9]])},
        {"steps": np.array([2, 1])},
        {"steps": np.array([-1, 1])},
        {"steps": np.array([1, 2**63 - 1])},
        {"balance": {"plan": np.full((2, LAYERS), 3e38)}},
        {"balance": {name: np.ones((2, LAYERS)) for name in ("plan", "\x1b[31m")}},
        {"balance": {name: np.ones((2, LAYERS)) for name in ("plan", "x" * 5000)}},
    ],
)
def test_a_schedule_of_something_else_says_so(change: dict[str, Any]) -> None:
    right = Schedule(np.array([1, 2]), np.zeros((0, 6), np.int64), {"plan": np.ones((2, LAYERS))})
    assert Schedule.from_bytes(right.to_bytes(), LAYERS).balance["plan"].shape == (2, LAYERS)
    with pytest.raises(InputError, match="run moeplan solve again"):
        Schedule.from_bytes(replace(right, **change).to_bytes(), LAYERS)


@pytest.mark.parametrize(("field", "value"), [("evaluations", 10**12), ("window", 10**9), ("trigger", 1e308)])
def test_a_policy_that_never_ends_is_refused(plan: Any, field: str, value: float) -> None:
    with pytest.raises(InputError, match="less than or equal"):
        edited(plan, f"decisions/rebalancing/{field}", value)


def test_rates_below_zero_are_refused(plan: Any) -> None:
    with pytest.raises((InputError, CertificationError), match="pair_s -1; expected none below 0"):
        edited(plan, "decisions/rebalancing/costs/pair_s", -1.0)


@pytest.mark.parametrize(
    ("use", "order", "named"), [("training", "known", True), ("training", "unknown", False), ("decode", "known", False)]
)
def test_auto_names_it_where_a_training_run_came_in_order(use: str, order: str, named: bool) -> None:
    source = SimpleNamespace(known={"step"}, meta=SimpleNamespace(step_order=order))
    told = strategy("flexmoe").why_auto_skips(cast(Any, SimpleNamespace(use=use, source=source)))
    assert ("moeplan solve --strategy flexmoe" in told) == named
