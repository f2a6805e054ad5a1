"""Auto: the best of what may stand together, chosen without a look at what is held out, within its time."""

import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moeplan.errors import InputError, UsageError
from moeplan.planner import solve
from moeplan.planner.certify import certify
from moeplan.planner.evaluate.evaluate import evaluate
from moeplan.planner.evaluate.journey import Journey, today
from moeplan.planner.report.plan import solve_report
from moeplan.planner.solve import Decided, decide, judge, plan_and_today, task_for
from moeplan.planner.strategies.auto import AutoParams, search, sections
from moeplan.planner.strategies.auto.ahead import solved_ahead
from moeplan.planner.strategies.auto.candidate import Candidate, Component, Components
from moeplan.planner.strategies.auto.options import AutoOptions
from moeplan.planner.strategies.auto.search import Search
from moeplan.planner.strategies.exflow.strategy import Exflow
from moeplan.planner.strategies.luffy.strategy import Luffy
from moeplan.planner.strategies.registry import STRATEGIES, strategy
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.description import on_cluster
from moeplan.profilers.presets import load_preset
from moeplan.profilers.profile import save
from moeplan.runtime.exports import ENGINES, prepared
from moeplan.runtime.plan import Metric, load
from moeplan.solvers.outcome import Status
from moeplan.traces.reader import Trace
from moeplan.traces.schema import PHASES, TokenBatch
from moeplan.traces.split import fitted
from moeplan.workers import Workers, opened
from tests.builders import known
from tests.planner.makers import (
    assert_refused,
    counted,
    edited,
    made,
    planned,
    request,
    rewritten,
    screen,
    sized,
    stored,
    tallied,
    training,
)
from tests.planner.strategies import rotation

MATTERS = 0.01


@pytest.fixture(scope="module")
def trace(make_trace: Any) -> Trace:
    """Tokens wide enough for chunks to pay."""
    narrow = make_trace(samples=40)
    return skewed(sized(narrow, Path(f"{narrow.path}-wide"), hidden_size=2048))


@pytest.fixture(scope="module")
def profile(make_profile: Any) -> Path:
    path: Path = make_profile("2x2")
    return path


@pytest.fixture(scope="module")
def plan(trace: Trace, profile: Path) -> Any:
    return planned(trace, "auto", profile=profile)


def test_the_plan_is_the_same_where_processes_try_candidates(trace: Trace, profile: Path, plan: Any) -> None:
    here, submit, sent = list[Component](), Workers.submit, list[tuple[Component, ...]]()

    def submitted(workers: Workers, task: Any, *args: Any) -> Any:
        if task is solved_ahead:
            _, component, base = args
            sent.append((*(base.components if base else ()), component))
        return submit(workers, task, *args)

    with opened("2") as workers, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "solve_component", noting(Search.solve_component, here))
        patch.setattr(Workers, "submit", submitted)
        again: Any = solve.make(request(trace, "auto", profile=profile), workers=workers).plan
    assert (again.decisions, again.evaluation, again.verdict) == (plan.decisions, plan.evaluation, plan.verdict)
    assert auto_of(again) == auto_of(plan)
    assert len(here) < len(auto_of(plan).tried) / 2
    assert len(sent) == len({*sent}) > 2


def noting(solve_component: Any, tried: list[Any]) -> Any:
    """The method, which notes what it solves in this process."""

    def noted(search: Search, component: Component, *args: Any, **settings: Any) -> Candidate:
        tried.append(component)
        solved: Candidate = solve_component(search, component, *args, **settings)
        return solved

    return noted


def skewed(trace: Trace, *, phase: str = "prefill") -> Trace:
    """The trace with many tokens of the experts 0 and 1 in every layer, all in one phase."""

    def change(batch: TokenBatch) -> dict[str, Any]:
        ids = batch.ids.copy()
        ids[batch.position % 3 == 0] = np.arange(ids.shape[2])
        return {"ids": ids, "phase": np.full(len(batch), PHASES.index(phase), np.int8)}

    return rewritten(trace, Path(f"{trace.path}-{phase}"), change)


def auto_of(plan: Any) -> AutoOptions:
    return AutoOptions.of(plan)


def names(plan: Any) -> set[tuple[str, ...]]:
    """The candidates that were tried."""
    return {one.parts for one in auto_of(plan).tried}


def walked(trace: Trace, **asked: Any) -> dict[bool, dict[str, tuple[float, float]]]:
    """The sure gain on the inner split, and the gain, of every sequence of strategies that may stand together, by
    whether samples move: nothing is skipped.

    Gains without an interval, of samples in a single step, are left out.
    """
    root = task_for(request(trace, "auto", **asked))
    kinds = [
        (strategy(name), model, params)
        for name in STRATEGIES
        for model in strategy(name).dispatch_models
        for params in strategy(name).variants(root)
        if root.use in strategy(name).uses and not (root.use == "training" and model == "coherent")
    ]
    gains: dict[bool, dict[str, tuple[float, float]]] = {False: {}, True: {}}
    decided_by = dict[tuple[Any, ...], Decided | None]({(): None})
    for sequence in (one for length in (1, 2, 3) for one in itertools.permutations(kinds, length)):
        (chosen, model, params), before = sequence[-1], decided_by.get(sequence[:-1])
        if len(sequence) > 1 and before is None:
            continue
        on = () if before is None else before.plan.decisions.names
        if {*on} - chosen.beside or (before and before.plan.dispatch_model == "coherent"):
            continue
        within = params.within(search.TRIAL_S, patient=True)
        own = replace(root.request, strategy=chosen.name, dispatch_model=model, params=within)
        base, files = (None, {}) if before is None else (before.plan, before.sidecars)
        task = replace(
            root, request=own, strategy=chosen, dispatch_model=model, base=base, base_files=files, inner=True
        )
        try:
            decided_by[sequence] = decided = decide(task)
        except UsageError:  # samples do not move where tokens use the nearest replica
            assert chosen.moves_samples
            assert known(known(before).plan.placement).replica_rule == "nearest"
            continue
        scene = replace(task.scene, cohorts=task.scene.cohorts[-1:])
        ours, today = evaluate(scene, plan_and_today(task, decided.plan, decided.sidecars)).judged.values()
        share = known(ours.share("step_s", today))
        if share.low is not None:
            gains[task.moves_samples][str(sequence)] = share.low, share.value
    return gains


# What is chosen.


@pytest.mark.parametrize(
    ("seed", "phase", "heavy"), [(0, "prefill", True), (1, "train", False), (2, "decode", True), (3, "prefill", False)]
)
def test_the_winner_is_within_1_percent_of_the_best_of_all_legal_sequences(
    make_trace: Any, profile: Path, seed: int, phase: str, heavy: bool
) -> None:
    trace = make_trace(seed=seed, samples=48)
    trace = skewed(trace, phase=phase) if heavy else rewritten(trace, Path(f"{trace.path}-even"), phased(phase))
    asked: dict[str, Any] = {"profile": profile, "concurrency" if phase == "decode" else "samples_per_step": 4}
    gains = walked(trace, **asked)
    assert sum(map(len, gains.values())) == {"decode": 10, "train": 33, "prefill": 34}[phase]
    chosen = auto_of(planned(trace, "auto", **asked)).tried[0]
    moves = "sample_policy" in chosen.decisions
    alike, others = gains[moves].values(), gains[not moves].values()
    assert any((chosen.inner, chosen.gain) == pytest.approx(one, abs=1e-9) for one in alike)
    best, other = (max((low for low, _ in rows), default=0.0) for rows in (alike, others))
    assert chosen.inner > best - MATTERS - 1e-9
    near = [gain for low, gain in others if low > other - MATTERS]
    assert known(chosen.gain) > min(near, default=0.0) - MATTERS - 1e-9


def phased(phase: str) -> Callable[[TokenBatch], dict[str, Any]]:
    return lambda batch: {"phase": np.full(len(batch), PHASES.index(phase), np.int8)}


def test_what_is_held_out_decides_nothing(trace: Trace, profile: Path, plan: Any, tmp_path: Path) -> None:
    def other(batch: TokenBatch) -> dict[str, Any]:
        """All held-out tokens at the last two experts, which would call for replicas of these."""
        ids, held = batch.ids.copy(), ~fitted(np.asarray(batch.sample), seed=0, fraction=0.5)
        ids[held] = trace.model.num_experts - 1 - np.arange(ids.shape[2])
        return {"ids": ids}

    changed = planned(rewritten(trace, tmp_path / "other", other), "auto", profile=profile)
    assert changed.decisions == plan.decisions
    assert [(one.parts, one.inner) for one in auto_of(changed).tried] == [
        (one.parts, one.inner) for one in auto_of(plan).tried
    ]
    assert [one.share for one in auto_of(changed).tried] != [one.share for one in auto_of(plan).tried]


def test_every_candidate_is_judged_on_what_judges_the_plan(plan: Any) -> None:
    """What runs today has the same figures beside each, but where steps are others, as of samples that move."""
    _, today, *_ = plan.evaluation.judging.contenders
    _, *others = auto_of(plan).tried
    stay = [one for one in others if "sample_policy" not in one.decisions]
    assert stay
    for one in stay:
        assert {name: one.today[name] for name in ("step_s", "balance")} == {
            name: today.metrics[name].value for name in ("step_s", "balance")
        }
        assert one.share.value == pytest.approx(1 - one.metrics["step_s"] / one.today["step_s"])


def test_a_candidate_solved_anew_has_the_figures_of_that_plan_on_what_is_held_out(trace: Trace, profile: Path) -> None:
    """The parts that a plan stands on are those: under their name the table shows the plan's own placement."""
    found = Search(task_for(request(trace, "auto", profile=profile)), AutoParams(), time.perf_counter())
    for component in found.components():
        if component.strategy.name == "eplb":
            found.attempt((component,))
    anew = {components: decide(found.task_of(components[0], None, inner=False)) for components in found.tried}
    best, second, *_ = found.ranked()
    row = found.record_held_out(second, anew[second.components])
    ours = known(judge(anew[second.components]).plan.evaluation).judging.contenders[0]
    assert row.metrics == {name: figure.value for name, figure in ours.metrics.items()}
    assert row.metrics != found.record_held_out(second, None).metrics, "decided by a part of the samples"
    chosen = found.record_held_out(best, anew[best.components])
    told = found.options(chosen, anew).tried[1]
    assert told.metrics == row.metrics
    found.params = AutoParams(time_limit_s=1e-9)
    late = found.options(chosen, {second.components: anew[second.components]})
    assert (len(late.tried), late.tried[1].metrics, late.status) == (2, row.metrics, Status.TIME_LIMIT)


def test_the_table_has_a_row_for_what_differs_in_numbers_of_replicas_alone(plan: Any) -> None:
    options = auto_of(plan)
    kinds, shown = (
        [re.sub(r"\d+", "N", one.name) for one in rows] for rows in (options.tried, [options.tried[0], *options.listed])
    )
    assert len(shown) == len({*shown}) < len(kinds)
    assert {*shown} == {*kinds} >= {"eplb", "eplb, N replicas", "eplb, N nearest"}


def test_slots_alone_are_told_from_what_lives_in_them(trace: Trace, profile: Path) -> None:
    plan, without = (planned(trace, "eplb", profile=profile, redundant=number) for number in (8, 0))
    judging, metric = plan.evaluation.judging, plan.verdict.metric
    figures = {one.label: one.metrics[metric].value for one in judging.contenders}
    spare = figures[f"contiguous in {plan.placement.num_slots} slots/standard"] / figures["contiguous/standard"] - 1
    ours = figures["plan/standard"] / figures["contiguous/standard"] - 1
    options: Any = SimpleNamespace(
        metric=metric, tried=[SimpleNamespace(parts=("eplb",), share=SimpleNamespace(value=-ours))]
    )
    assert [*sections._added(options, plan, judging)] == [
        f"what each part adds, in % of today: as many slots with experts in order {100 * spare:+.1f},"
        f" eplb {100 * (ours - spare):+.1f}"
    ]
    assert not [*sections._added(options, without, judging)]


def test_the_same_request_gives_the_same_plan_and_table(trace: Trace, profile: Path, plan: Any) -> None:
    again = planned(trace, "auto", profile=profile)
    assert again.plan_sha256 == plan.plan_sha256
    assert auto_of(again) == auto_of(plan)


def test_the_plan_is_that_of_its_strategies_one_on_the_other(trace: Trace, profile: Path, tmp_path: Path) -> None:
    plan, base = planned(trace, "auto", profile=profile), None
    for name, part in zip(plan.strategies, auto_of(plan).tried[0].parts, strict=True):
        replicas = dict[str, Any]()
        if found := re.search(r", (\d+) (replicas|nearest)", part):
            replicas = {"redundant": int(found[1]), "replica_rule": found[2].replace("replicas", "even")}
        model = {"dispatch_model": "standard"} if name == "exflow" else {}
        own = planned(trace, name, profile=profile, on=base, to=tmp_path / f"{name}.json", **replicas, **model)
        base = tmp_path / f"{name}.json"
    assert own.plan_sha256 == plan.plan_sha256
    assert own.evaluation.judging.contenders[:2] == plan.evaluation.judging.contenders[:2]


def test_few_slots_and_parts_are_preferred_to_gains_that_do_not_matter(plan: Any) -> None:
    chosen, *others = auto_of(plan).tried
    assert "sample_policy" not in chosen.decisions
    others = [one for one in others if "sample_policy" not in one.decisions]
    assert all(one.inner - chosen.inner < MATTERS for one in others if one.has_interval >= chosen.has_interval)
    smaller = [one for one in others if chosen.inner - one.inner < 0 and len(one.parts) < len(chosen.parts)]
    assert not smaller


def searched(trace: Trace, shares: dict[Components, Metric], **asked: Any) -> Search:
    """A search that has compared these candidates, without slots, on the inner split."""

    def decided(parts: Components) -> Any:
        task = SimpleNamespace(moves_samples=any(one.strategy.moves_samples for one in parts))
        return SimpleNamespace(plan=SimpleNamespace(placement=None), task=task)

    found = Search(task_for(request(trace, "auto", **asked)), AutoParams(), time.perf_counter())
    found.tried |= {parts: Candidate(parts, decided(parts), share, 0.0) for parts, share in shares.items()}
    return found


def part(name: str, **params: Any) -> Component:
    """A part under its strategy's first dispatch model."""
    chosen = strategy(name)
    return Component(chosen, chosen.dispatch_models[0], STRATEGIES[name].params(**params))


def test_ends_of_unlike_intervals_rank_nothing(trace: Trace) -> None:
    """Two whole steps of samples that move say little and look sure; a step drawn from blocks has a wide interval."""
    drawn, moving = (part("eplb", redundant=8), part("pipemoe")), (part("eplb"), part("netmoe"))
    gains: dict[Components, Metric] = {
        drawn: Metric(value=0.58, low=0.3909, high=0.71),
        moving: Metric(value=0.41, low=0.3934, high=0.44),
    }
    assert [one.components for one in searched(trace, gains).ranked()] == [drawn, moving]
    bold: Components = (part("eplb", redundant=16), part("pipemoe"))  # gains more, and less for sure: of the same kind
    gains[bold] = Metric(value=0.62, low=0.35, high=0.8)
    assert [one.components for one in searched(trace, gains).ranked()] == [drawn, bold, moving]


def test_a_gain_with_an_interval_goes_before_one_of_less_effort_without(trace: Trace) -> None:
    sure, simple = (part("eplb", redundant=8), part("pipemoe")), (part("eplb"),)
    shares: dict[Components, Metric] = {
        simple: Metric(value=0.4, low=None, high=None),
        sure: Metric(value=0.45, low=0.4, high=0.5),
    }
    assert [one.components for one in searched(trace, shares).ranked()] == [sure, simple]


@pytest.mark.parametrize("gain", [0.005, 0.02])
def test_a_part_that_gains_less_than_1_percent_alone_takes_no_place_of_another(trace: Trace, gain: float) -> None:
    eplb, pipemoe, other = part("eplb"), part("pipemoe"), replace(part("exflow"), dispatch_model="standard")
    gains: dict[Components, float] = {(eplb, pipemoe): 0.5, (eplb,): 0.4, (pipemoe,): 0.3, (other,): gain}
    shares = {parts: Metric(value=gain, low=gain, high=gain) for parts, gain in gains.items()}
    assert ((other, pipemoe) in [*searched(trace, shares).replaced()]) == (gain >= MATTERS)


def test_a_part_is_added_below_one_that_nothing_stands_on(trace: Trace) -> None:
    eplb, pipemoe, netmoe = map(part, ("eplb", "pipemoe", "netmoe"))
    gains: dict[Components, float] = {(eplb, netmoe): 0.4, (eplb,): 0.3, (netmoe,): 0.2, (pipemoe,): 0.1}
    shares = {parts: Metric(value=gain, low=gain, high=gain) for parts, gain in gains.items()}
    assert (eplb, pipemoe, netmoe) in [*searched(trace, shares).grown()]


def test_numbers_of_replicas_take_one_place_among_the_best_and_stand_in_for_each_other(trace: Trace) -> None:
    numbers, pipemoe, netmoe = [part("eplb", redundant=4 * n) for n in range(4)], part("pipemoe"), part("netmoe")
    gains: dict[Components, float] = {(pipemoe,): 0.3, (netmoe,): 0.2}
    gains |= {(one,): 0.4 + 0.001 * n for n, one in enumerate(numbers)}
    gains[numbers[0], pipemoe] = 0.5
    shares = {parts: Metric(value=gain, low=gain, high=gain) for parts, gain in gains.items()}
    found = searched(trace, shares)
    assert (pipemoe, netmoe) in [*found.grown()]
    assert {*found.replaced()} == {(one, pipemoe) for one in numbers}


def test_of_numbers_of_replicas_the_one_that_gains_most_for_sure_stands_for_all(trace: Trace) -> None:
    bold, sure = part("eplb", redundant=4), part("eplb", redundant=8)
    shares: dict[Components, Metric] = {
        (bold,): Metric(value=0.5, low=0.2, high=0.8),
        (sure,): Metric(value=0.4, low=0.3, high=0.5),
    }
    assert [one.components for one in searched(trace, shares).kinds()] == [(sure,)]


def test_what_cannot_gain_is_refused_unsolved_and_still_tried_where_it_may(
    trace: Trace, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone the bound is as long as today, on experts placed otherwise it is luffy's own."""
    own, solved = Luffy.bound, Luffy.solve

    def bound(self: Luffy, journey: Journey) -> Journey:
        usual = today(trace.model, Cluster.parse("2x2")).journey
        return journey if journey.placement.sends_as(usual.placement) else own(self, journey)

    def checked(self: Luffy, task: Any) -> Any:
        assert task.base is not None, "luffy was solved alone"
        return solved(self, task)

    monkeypatch.setattr(Luffy, "bound", bound)
    monkeypatch.setattr(Luffy, "solve", checked)
    plan = planned(trace, "auto", profile=profile)
    assert auto_of(plan).refused["luffy"] == "it saves 0.0 % of the time per step at most, whatever it decides"
    assert any(parts[-1] == "luffy" for parts in names(plan))
    told = screen(solve_report, plan, Path("plan.json"), verbose=True)
    assert "not tried: luffy: it saves 0.0 % of the time per step at most, whatever it decides" in told


def test_every_number_of_replicas_is_compared_by_the_seconds_of_experts_where_these_are_known(tmp_path: Path) -> None:
    """More replicas are more even, and read more weights: at few tokens the least of them is the fastest."""
    trace, _ = tallied(tmp_path / "counts", hidden_size=2048, ffn_size=1024, dtype_bytes=2)
    save(on_cluster(load_preset("h200_sxm"), "2x2", ("inter=50:5",)), tmp_path / "h200.json")
    by_load, by_seconds = (planned(trace, "auto", profile=one) for one in (None, tmp_path / "h200.json"))
    for plan, metric in ((by_load, "balance"), (by_seconds, "experts_s")):
        chosen, *others = auto_of(plan).tried
        assert names(plan) == {("eplb",), *((f"eplb, {4 * n} replicas",) for n in (1, 2, 3, 4))}
        assert auto_of(plan).metric == plan.verdict.metric == metric
        assert chosen.inner > max(one.inner for one in others) - MATTERS
        assert all(known(one.gain) >= one.inner for one in (chosen, *others))
    assert known(by_load.placement).num_slots > known(by_seconds.placement).num_slots
    best = {
        metric: min(auto_of(by_seconds).tried, key=lambda one: one.metrics[metric])
        for metric in ("balance", "experts_s")
    }
    assert best["balance"].parts != best["experts_s"].parts


# What may be chosen.


def test_parts_stand_beside_each_other_and_nothing_on_coherent_dispatch(plan: Any) -> None:
    tried = auto_of(plan).tried
    assert {len(one.parts) for one in tried} >= {1, 2}
    for one in tried:
        kinds = [strategy(name.partition(",")[0]) for name in one.parts]
        for at, chosen in enumerate(kinds):
            assert {before.decides for before in kinds[:at]} <= chosen.beside
        assert len(one.parts) == 1 or one.dispatch_model != "coherent"
    assert any(one.dispatch_model == "coherent" for one in tried)


def test_training_counts_both_passes_for_all_and_leaves_coherent_dispatch_out(
    trace: Trace, profile: Path, tmp_path: Path
) -> None:
    for plan in (
        planned(trace, "auto", profile=profile, purpose="training", tokens_per_step=80),
        planned(training(trace, tmp_path / "trained"), "auto", profile=profile),
    ):
        options = auto_of(plan)
        assert all("moe_backward_s" in figures for one in options.tried for figures in (one.metrics, one.today))
        assert "coherent" not in {one.dispatch_model for one in options.tried}
        assert "luffy" in {part for one in options.tried for part in one.parts} or "at most" in options.refused["luffy"]
        assert options.refused["exflow, coherent"] == "not for training"


@pytest.mark.parametrize("engine", ["sglang", "vllm", "vllm-ascend", "tensorrt-llm"])
def test_engines_are_given_placements_in_equal_slots_under_standard_dispatch(
    trace: Trace, profile: Path, engine: str
) -> None:
    plan = planned(trace, "auto", profile=profile, engine=engine)
    assert plan.decisions.names == ("placement",)
    assert plan.dispatch_model == "standard"
    assert isinstance(plan.decisions.placement.slots_per_device, int)
    assert all(engine in one.engines for one in auto_of(plan).tried)
    assert auto_of(plan).refused["pipemoe"] == f"{engine} does not carry it out"
    assert any("nearest" in part for one in auto_of(plan).tried for part in one.parts)
    assert plan.options["evaluation"]["engine_rule"] == ENGINES[engine].replica_rule
    told = screen(solve_report, plan, Path("plan.json"))
    assert f"next: moeplan apply plan.json --engine {engine} -o {engine}" in told


@pytest.mark.parametrize("engine", ["sglang", "vllm", "vllm-ascend", "tensorrt-llm"])
def test_on_devices_that_experts_do_not_divide_by_an_engine_is_given_slots_that_do(
    trace: Trace, engine: str, tmp_path: Path
) -> None:
    plan = planned(trace, "auto", cluster="1x3", engine=engine)
    placement = known(plan.placement)
    assert placement.num_experts % 3
    assert placement.num_slots % 3 == 0
    config = replace(plan.model, num_hidden_layers=max(plan.model.layer_ids) + 1)
    prepared(plan, engine, tmp_path / "files", config=config)  # refuses what the engine would


def test_rows_that_are_left_out_are_counted_and_no_column_is_at_80_columns(
    plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = len(auto_of(plan).tried)
    monkeypatch.setattr(sections, "MOST_ROWS", 4)
    shown = screen(solve_report, plan, Path("plan.json"), width=80)
    assert f"{tried - 3} more rows: --json" in shown
    assert all(column in shown for column in ("% of today", "balance (p95)", "copies/token"))
    monkeypatch.setattr(sections, "MOST_ROWS", tried + 1)
    different = {re.sub(r"\d+", "", one.name) for one in auto_of(plan).tried}  # numbers of replicas share a row
    assert f"{tried - len(different)} more rows" in screen(solve_report, plan, Path("plan.json"), width=80)


def test_rows_of_steps_that_are_not_scaled_up_are_named(plan: Any) -> None:
    """They stand beside rows of a step that may be many times as large."""
    best, *_ = auto_of(plan).tried
    quarter = {name: figure / 4 for name, figure in best.today.items()}
    small = best.model_copy(update={"parts": ("luffy",), "decisions": ("sample_policy",), "today": quarter})
    assert sections._smaller((best, small), "step_s") == ["luffy"]
    assert sections._smaller((small, small), "step_s") == []


def test_tutel_is_given_degrees_alone(trace: Trace, profile: Path) -> None:
    plan = planned(trace, "auto", profile=profile, engine="tutel")
    assert names(plan) == {("pipemoe",)}
    with pytest.raises(UsageError) as refused:
        planned(trace, "auto", profile=profile, engine="tutel", concurrency=8)
    assert str(refused.value) == (
        "--engine tutel carries out a pipeline alone, and no strategy can plan one by this: pipemoe: not for decode;"
        " give another --engine, or --for"
    )


@pytest.mark.parametrize("model", ["standard", "coherent", "migrating"])
def test_a_dispatch_model_that_is_asked_for_is_the_only_one(trace: Trace, profile: Path, model: str) -> None:
    plan = planned(trace, "auto", profile=profile, dispatch_model=model)
    assert plan.dispatch_model == model
    assert {one.dispatch_model for one in auto_of(plan).tried} == {model}


def test_coherent_dispatch_in_training_is_refused(trace: Trace, profile: Path) -> None:
    with pytest.raises(UsageError, match="exflow, coherent: not for training"):
        planned(trace, "auto", profile=profile, dispatch_model="coherent", purpose="training", tokens_per_step=80)


def test_a_new_strategy_is_tried_by_its_row_alone(trace: Trace, profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rotation.register(monkeypatch.setitem)
    monkeypatch.setattr(rotation.Rotation, "beside", frozenset({"pipeline"}))
    params = rotation.RotationParams
    monkeypatch.setattr(rotation.Rotation, "variants", lambda *_: (params(), params(most_slots=5)))
    plan = planned(trace, "auto", profile=profile)
    assert {("rotation",), ("rotation, --most-slots 5",)} <= names(plan)
    told = screen(solve_report, plan, Path("plan.json"), verbose=True)
    assert "rotation, --most-slots 5" in told


# Time, and Ctrl-C.


class Clock:
    """A clock that only work moves: deciding a second by strategy, twice on all fitted units, replaying a part one."""

    def __init__(self, patch: pytest.MonkeyPatch, *, decide_s: float = 1.0, part_s: float = 1.0) -> None:
        self.now_s = 0.0
        self._decide_s, self._part_s = decide_s, part_s
        patch.setattr(time, "perf_counter", lambda: self.now_s)
        patch.setattr(solve, "decide", self._decided(solve.decide))
        for module in (solve, search):
            patch.setattr(module, "evaluate", self._evaluated(evaluate))

    def _decided(self, own: Callable[..., Decided]) -> Callable[..., Decided]:
        def decided(task: Any) -> Decided:
            begun, result = self.now_s, own(task)
            searched_s = getattr(task.params, "time_limit_s", 0.0)
            self.now_s = begun + searched_s + self._decide_s * (1 if task.inner else 2)
            outcome = replace(result.solution.outcome, wall_s=searched_s)
            return replace(result, solution=replace(result.solution, outcome=outcome))

        return decided

    def _evaluated(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def evaluated(scenes: Any, *rows: Any, **more: Any) -> Any:
            self.now_s += self._part_s * len(scenes[0][1].cohorts)
            return own(scenes, *rows, **more)

        return evaluated


@pytest.mark.parametrize("limit_s", [15.0, 25.0, 40.0, 200.0])
def test_the_time_limit_is_that_of_all_of_it(
    trace: Trace, profile: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> None:
    clock = Clock(monkeypatch)
    plan = planned(trace, "auto", profile=profile, time_limit_s=limit_s)
    assert clock.now_s <= limit_s + 1
    options = auto_of(plan)
    assert (options.status is Status.TIME_LIMIT) == (limit_s < 200)
    assert len(options.tried) > 1
    told = screen(solve_report, plan, Path("plan.json"))
    assert ("time limit: the best found until then" in told) == (limit_s < 200)


def test_a_time_limit_that_is_over_at_once_leaves_the_first_part(
    trace: Trace, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    plan = planned(trace, "auto", profile=profile, time_limit_s=0.01)
    assert names(plan) == {("eplb",)}
    assert auto_of(plan).status is Status.TIME_LIMIT
    certify(plan, trace.path, profile)


@pytest.mark.parametrize("times", [1, 3, 8])
def test_ctrl_c_keeps_the_best_that_was_found(
    trace: Trace, profile: Path, plan: Any, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    stop_after(times, monkeypatch)
    stopped = made(trace, "auto", profile=profile)
    inner = {one.parts: one.inner for one in auto_of(plan).tried}
    before = names(stopped.plan)
    assert stopped.interrupted
    assert before < {*inner}
    assert len(before) == min(times, len(before)) > 0
    assert inner[auto_of(stopped.plan).tried[0].parts] > max(inner[parts] for parts in before) - MATTERS
    assert "interrupted: the best found until then" in screen(solve_report, stopped.plan, Path("plan.json"))
    certify(stopped.plan, trace.path, profile, folder=None)


def stop_after(times: int, patch: pytest.MonkeyPatch) -> None:
    """Let the attempt after so many be Ctrl-C."""
    attempt, begun = Search.attempt, itertools.count()

    def interrupted(self: Search, parts: Any, ahead: Any = None) -> None:
        if next(begun) == times:
            raise KeyboardInterrupt
        attempt(self, parts, ahead)

    patch.setattr(Search, "attempt", interrupted)


def test_ctrl_c_before_anything_was_found_ends_it(trace: Trace, profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(0, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        planned(trace, "auto", profile=profile)


def test_a_second_ctrl_c_in_the_last_solve_ends_it(
    trace: Trace, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(3, monkeypatch)

    def stopped(_decided: Decided) -> Any:
        raise KeyboardInterrupt

    solved, decided = list[Decided](), solve.decide

    def counted_decide(task: Any) -> Decided:
        solved.append(decided(task))
        return solved[-1]

    monkeypatch.setattr(solve, "decide", counted_decide)
    monkeypatch.setattr(solve, "judge", stopped)
    with pytest.raises(KeyboardInterrupt):
        made(trace, "auto", profile=profile)
    assert sum(not one.task.inner for one in solved) == 1, "it was not solved once more"


@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_in_the_last_solve_makes_it_once_more_and_a_second_one_ends_it(
    trace: Trace, profile: Path, plan: Any, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """The first ends the judgement of the plan; the plan is that of no Ctrl-C."""
    judged, pressed = solve.judge, itertools.count()

    def stopped(decided: Decided) -> Any:
        if next(pressed) <= again:
            raise KeyboardInterrupt
        return judged(decided)

    monkeypatch.setattr(solve, "judge", stopped)
    if again:
        with pytest.raises(KeyboardInterrupt):
            made(trace, "auto", profile=profile)
        return
    result = made(trace, "auto", profile=profile)
    assert result.interrupted
    assert result.plan.decisions == plan.decisions
    assert auto_of(result.plan).status is Status.INTERRUPTED


def test_ctrl_c_in_a_search_that_keeps_its_best_ends_auto_too(
    trace: Trace, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved = Exflow.solve

    def stopped(self: Exflow, task: Any) -> Any:
        solution = solved(self, task)
        status = Status.INTERRUPTED if task.inner else solution.outcome.status
        return replace(solution, outcome=replace(solution.outcome, status=status))

    monkeypatch.setattr(Exflow, "solve", stopped)
    result = made(trace, "auto", profile=profile)
    assert result.interrupted
    assert ("exflow, coherent",) in names(result.plan)  # kept
    assert ("exflow, standard",) not in names(result.plan)
    assert max(map(len, names(result.plan))) == 1


# Inputs of every kind.


def test_of_counts_eplb_alone_plans_and_the_others_are_refused_in_a_line(tmp_path: Path) -> None:
    trace, _ = tallied(tmp_path / "counts")
    plan = planned(trace, "auto")
    assert plan.strategies == ("eplb",)
    assert plan.verdict.value == "benefit"
    told = screen(solve_report, plan, Path("plan.json"), verbose=True)
    assert "\nnot tried: exflow, coherent; exflow, standard: counts alone\n" in told
    assert "\nnot tried: pipemoe; netmoe: it changes no device's load, and nothing times whole steps\n" in told
    certify(plan, trace.path)


def test_counts_are_compared_by_the_seconds_of_experts_even_where_some_exchanges_are_timed(
    trace: Trace, profile: Path, tmp_path: Path
) -> None:
    plan = planned(counted(trace, tmp_path / "counts"), "auto", profile=profile)
    assert auto_of(plan).metric == plan.verdict.metric == "experts_s"
    assert plan.strategies == ("eplb",)
    assert " of the experts' time (" in screen(solve_report, plan, Path("plan.json"))


def test_one_snapshot_of_counts_is_fitted_and_judged_whole(tmp_path: Path) -> None:
    loads = np.random.default_rng(0).integers(1, 100, (1, 3, 16))
    trace = stored(tmp_path / "snapshot", loads)
    with pytest.raises(InputError, match="give --fit-fraction 1"):
        planned(trace, "auto", fit_fraction=0.5)
    plan = planned(trace, "auto")
    assert plan.inputs.trace.split.fit_fraction == 1.0
    assert plan.strategies == ("eplb",)
    assert plan.verdict.value == "none"  # one step shows nothing of others
    told = screen(solve_report, plan, Path("plan.json"))
    assert "no benefit shown: -" in told
    assert told.endswith("next: record more, or moeplan apply plan.json\n")  # which apply leaves to the user


def test_engines_that_only_serve_are_not_named_for_training(trace: Trace) -> None:
    """The embedded model's placement suits every engine; none that carries placements trains."""
    named = {}
    for purpose in ("serving", "training"):
        plan = planned(trace, "auto", purpose=purpose, tokens_per_step=80)
        assert set(auto_of(plan).tried[0].engines) == {"sglang", "vllm", "vllm-ascend", "tensorrt-llm"}
        told = screen(solve_report, plan, Path("plan.json"), verbose=True)
        named[purpose] = [name for name in ENGINES if name in told]
        assert told.count("vllm-ascend") == told.count("vllm-ascend (Ascend NPUs)")
    assert "vllm-ascend" in named["serving"]
    assert not named["training"]


def test_an_engine_that_takes_no_placement_of_the_model_is_refused_with_the_ways_that_are_left(
    trace: Trace, tmp_path: Path
) -> None:
    named = sized(trace, tmp_path / "named", name="gpt-oss-20b")
    ways = (
        r"--engine vllm: no EPLB for gpt-oss; expected one of vllm-ascend \(Ascend NPUs\), tensorrt-llm, tutel\."
        r" For vllm a plan without replicas \(.*--redundant 0\) goes into the checkpoint: moeplan apply PLAN --check"
    )
    with pytest.raises(UsageError, match=ways):
        planned(named, "auto", engine="vllm")


def test_where_nothing_pays_it_says_so(make_trace: Any, tmp_path: Path) -> None:
    def even(batch: TokenBatch) -> dict[str, Any]:
        """Every expert as often as any other, in every sample."""
        first = (batch.position[:, None] + np.arange(batch.ids.shape[1])) % 8
        return {"ids": np.stack([first, (first + 4) % 8], axis=2).astype(np.uint16)}

    trace = rewritten(make_trace(samples=40, tokens=16), tmp_path / "even", even)
    plan = planned(trace, "auto", engine="sglang")
    told = screen(solve_report, plan, Path("plan.json"))
    assert plan.verdict.value == "none"
    assert "no benefit expected" in told
    assert "next: nothing to apply" in told


def test_without_a_profile_the_currency_is_balance_and_the_screen_names_the_preset(trace: Trace) -> None:
    plan = planned(trace, "auto")
    assert auto_of(plan).metric == "balance"
    told = screen(solve_report, plan, Path("plan.json"), verbose=True)
    assert "--preset h200_sxm" in told
    assert "% of ideal" not in told
    assert "not tried: pipemoe; netmoe: it changes no device's load, and nothing times whole steps" in told


def test_what_no_part_can_read_is_refused_once_as_itself(make_trace: Any, profile: Path) -> None:
    with pytest.raises(InputError, match=r"^[^;]*: 1 sample in all; expected two or more"):
        planned(make_trace(samples=1), "auto", profile=profile, fit_fraction=0.5)


def test_a_base_and_a_plan_in_force_are_refused_by_name(trace: Trace, tmp_path: Path) -> None:
    planned(trace, "eplb", to=tmp_path / "base.json")
    with pytest.raises(UsageError, match="--on with --strategy auto; say which strategy adds to that plan"):
        planned(trace, "auto", on=tmp_path / "base.json")
    with pytest.raises(UsageError, match="--from with --strategy auto; only exflow re-plans: give --strategy exflow"):
        planned(trace, "auto", previous=tmp_path / "base.json")


# What is certified.


def test_a_plan_certifies_and_says_that_other_candidates_are_not_checked(
    trace: Trace, profile: Path, tmp_path: Path
) -> None:
    result = made(trace, "auto", profile=profile, to=tmp_path / "plan.json")
    certificate = certify(load(tmp_path / "plan.json"), trace.path, profile, folder=tmp_path)
    assert certificate.replayed
    assert "what other candidates of auto give" in certificate.unchecked
    assert {"the chosen candidate of auto", *(f"objective of {n}" for n in result.plan.decisions.names[1:])} <= {
        *certificate.checks
    }


def gaining_where_samples_move(tried: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All whose samples move show that they gain far more, by the gain itself."""
    return [one | {"gain": 0.99, "has_interval": True} if "sample_policy" in one["decisions"] else one for one in tried]


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("options/auto/tried/0/metrics/step_s", lambda x: x * 0.99, "step_s of chosen"),
        ("options/auto/tried/0/metrics", lambda x: {**x, "hops": 1.0}, "metrics of chosen"),
        ("options/auto/tried/0/today/balance", lambda x: x * 1.01, "balance of today"),
        ("options/auto/tried/0/share/value", lambda x: x + 0.01, "share of chosen"),
        ("options/auto/tried/0/parts", lambda _: ["exflow, standard"], "chosen is exflow, standard"),
        ("options/auto/tried/0/decisions", lambda _: ["placement", "sample_policy"], "chosen is"),
        ("options/auto/tried/0/dispatch_model", lambda _: "migrating", "chosen is"),
        ("options/auto/tried/0/engines", lambda _: ["sglang", "tutel"], "chosen is"),
        ("options/auto/engine", lambda _: "tutel", "made for tutel, which does not carry the plan out"),
        ("options/auto/tried/0/inner", lambda x: x - 0.2, "gained 1 % more"),
        ("options/auto/tried/1/inner", lambda x: x + 0.9, "gained 1 % more"),
        ("options/auto/tried", gaining_where_samples_move, "gained 1 % more"),
        ("options/auto/metric", lambda _: "balance", "share of chosen"),
        ("options/auto/tried", lambda _: [], "options.auto"),
    ],
)
def test_a_record_that_contradicts_the_plan_is_refused_without_a_trace(
    plan: Any, path: str, change: Any, words: str
) -> None:
    assert_refused(edited(plan, path, change), words=words)


def test_a_plan_stands_beside_moved_samples_of_which_some_of_the_best_gain_less_than_1_percent_more(plan: Any) -> None:
    """The best of them gains 1.2 % more, another that is about as good 0.5 %, and may need less."""
    chosen, *others = plan.model_dump(mode="json")["options"]["auto"]["tried"]
    moving = [one for one in others if "sample_policy" in one["decisions"]][:2]
    for one, more in zip(moving, (0.012, 0.005), strict=True):
        one |= {"has_interval": True, "gain": chosen["gain"] + more, "inner": more}
    kept = [one for one in others if "sample_policy" not in one["decisions"]]
    certify(edited(plan, "options/auto/tried", [chosen, *kept, *moving]))
    moving[1]["gain"] += 0.006
    assert_refused(edited(plan, "options/auto/tried", [chosen, *kept, *moving]), words="gained 1 % more")


# The command line.


def run(folder: Path, *args: object, code: str = "from moeplan.planner.cli import main\nmain()") -> Any:
    """What the command says, run in a folder."""
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


def test_solve_without_a_strategy_is_auto(trace: Trace, tmp_path: Path) -> None:
    done = run(tmp_path, "solve", "--trace", trace.path, "--cluster", "2x2", "--samples-per-step", 16, "--json")
    assert done.returncode == 0, done.stderr
    told, written = json.loads(done.stdout), load(tmp_path / "plan.json")
    assert told["options"]["auto"]["metric"] == "balance"
    assert told["plan_sha256"] == written.plan_sha256 == planned(trace, "auto", samples_per_step=16).plan_sha256
    for flag, words in (("--on", "say which strategy adds to that plan"), ("--from", "give --strategy exflow")):
        refused = run(tmp_path, "solve", flag, "plan.json", "--trace", trace.path, "-o", "other.json")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert words in refused.stderr
    assert not (tmp_path / "other.json").exists()


def test_a_solve_that_ctrl_c_ended_writes_its_plan_and_exits_as_interrupted(trace: Trace, tmp_path: Path) -> None:
    code = (
        "import itertools\n"
        "from moeplan.planner.strategies.auto.search import Search\n"
        "attempt, begun = Search.attempt, itertools.count()\n"
        "def stopped(self, parts, *ahead):\n"
        "    if next(begun) == 3: raise KeyboardInterrupt\n"
        "    attempt(self, parts, *ahead)\n"
        "Search.attempt = stopped\n"
        "from moeplan.planner.cli import main\n"
        "main()"
    )
    done = run(tmp_path, "solve", "--trace", trace.path, "--cluster", "2x2", code=code)
    assert done.returncode == 130
    assert "interrupted: the best found until then" in done.stdout
    assert "moeplan: interrupted; plan.json holds the best found until then" in done.stderr
    assert auto_of(load(tmp_path / "plan.json")).status is Status.INTERRUPTED
