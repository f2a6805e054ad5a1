"""`moeplan replay`: what runs is what was recorded, on real ranks, and costs what the evaluator counts."""

import contextlib
import io
import itertools
import json
import os
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from rich.console import Console

from moeplan.errors import InputError, RankError, UsageError
from moeplan.planner.cli.replay import replay as command
from moeplan.planner.demo.text import other_text, record_embedded
from moeplan.planner.evaluate.metrics import COPIES
from moeplan.planner.replay import job, ranks
from moeplan.planner.replay.job import AGAIN, Experiment, Measured, Prepared, _doubts, prepare, replay
from moeplan.planner.replay.model import LayersAlone, States
from moeplan.planner.replay.ranks import TURNS, Timed, Way, Work, run
from moeplan.planner.replay.report import replay_report, replayed_sections
from moeplan.planner.replay.result import Ran, Replayed, Span, beside
from moeplan.planner.replay.steps import Recorded
from moeplan.planner.report.next_step import after_replay
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.description import describe
from moeplan.profilers.origin import Environment
from moeplan.profilers.predictor import predict
from moeplan.profilers.profile import Profile, load, save
from moeplan.profilers.stopwatch import Laps
from moeplan.profilers.world import World
from moeplan.runtime import load_plan, parallelize, schedule_of
from moeplan.runtime.plan import FileInput
from moeplan.runtime.rebalancing import tables_of
from moeplan.traces.model import NOT_ROUTED
from moeplan.traces.reader import Trace, open_trace
from moeplan.traces.schema import PHASES
from tests.builders import environment, known, measured_profile, model, series
from tests.planner.cli.conftest import MAIN, ended, python, started, wait_until_said
from tests.planner.makers import counted, made, rewritten, write_profile
from tests.runtime.worlds import by_rank

LENGTH, SAMPLES = 16, 48
PLANS: dict[str, dict[str, Any]] = {
    "exflow": {"time_limit_s": 0.5},
    "eplb": {"slots": 9},
    "netmoe": {"method": "sum"},
}
ROWS: dict[str, dict[str, Any]] = {
    "gates": {"condense": 0.1},
    "star": {"condense": 0.6, "method": "paper"},
    "paper": {"condense": 0.6, "method": "paper", "condense_schedule": "paper"},
    "fp8": {"condense": 0.1, "wire": "fp8"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of the embedded model with its hidden states, the same in steps of a training run, and plans of both for
    two devices.
    """
    folder = tmp_path_factory.mktemp("replay")
    text = other_text()[: LENGTH * SAMPLES]
    trace = record_embedded(text, folder / "trace", sample_tokens=LENGTH, weights=True, embeddings="all")
    for name, settings in PLANS.items():
        made(trace, name, "1x2", to=folder / f"{name}.json", **settings)
    for name, settings in ROWS.items():
        made(trace, "luffy", "1x2", to=folder / f"{name}.json", **settings)
    made(drifting(trace, folder / "steps"), "flexmoe", "1x2", to=folder / "flexmoe.json", slots=10)
    return folder


def drifting(trace: Trace, folder: Path) -> Trace:
    """The trace in steps of four samples of training, three of which ask for two experts, others after two steps."""

    def change(batch: Any) -> Mapping[str, Any]:
        step_T, ids = (batch.sample // 4).astype(np.int32), batch.ids.copy()
        busy_T = batch.sample % 4 > 0
        first_T = 2 * (step_T[busy_T] // 2) % trace.model.num_experts
        ids[busy_T] = np.stack([first_T, first_T + 1], axis=1)[:, None]
        return {"step": step_T, "ids": ids, "phase": phase_of(batch, "train")}

    return rewritten(trace, folder, change)


def phase_of(batch: Any, name: str) -> Any:
    return np.full(len(batch), PHASES.index(name), np.int8)


def experiment(folder: Path, *names: str, trace: str = "trace", **settings: Any) -> Experiment:
    return Experiment(plans=[folder / f"{name}.json" for name in names], trace=str(folder / trace), **settings)


def asked(folder: Path, *names: str, **settings: Any) -> Prepared:
    """A replay that waits for its ranks."""
    return prepare(experiment(folder, *names, **settings))


def carried(world: World, work: Work) -> list[tuple[int, list[list[int]]]]:
    """Experts of this rank's tokens in the first step under the last way, by layer."""
    way = [*work.ways.values()][-1]
    plan = load_plan(str(way.plan))
    layers = LayersAlone(work.spec, torch.from_numpy(work.recorded.ids.astype(np.int32)))
    spread = parallelize(layers.eval(), plan)
    layers.fill(world.rank)
    spread(*ranks._inputs(work.recorded, 0, world.rank, plan.dispatch_model))
    return [(layer, sorted(routed.ids.tolist())) for layer, routed in enumerate(spread.routed)]


@pytest.mark.parametrize("name", PLANS)
def test_every_token_goes_to_its_recorded_experts(folder: Path, name: str) -> None:
    work = asked(folder, name, tokens=100).work
    told = by_rank(2, carried, work)
    for layer in range(work.spec.num_layers):
        found = [ids for rank in told for at, rows in rank for ids in rows if at == layer]
        assert sorted(found) == sorted(work.recorded.ids[:, layer].tolist())


def sent(prepared: Prepared) -> tuple[Any, Any]:
    """Copies measured, and predicted, by round and way."""
    timed: list[Timed] = by_rank(2, ranks.run, prepared.work)
    measured = np.sum([rank.copies for rank in timed], axis=0)
    predicted = [one[COPIES][1][list(prepared.work.steps)] for one in prepared.predicted]
    return measured, np.stack(predicted, axis=1)


def test_copies_sent_are_those_that_the_evaluator_counts(folder: Path) -> None:
    measured, predicted = sent(asked(folder, *PLANS, tokens=100, rounds=1))
    assert (measured == predicted).all()
    assert len({*measured[0].tolist()}) > 2


def test_uneven_samples_move_between_ranks(folder: Path, tmp_path: Path) -> None:
    def shorter(batch: Any) -> Mapping[str, Any]:
        """The samples with their lengths in turn, by giving some of their tokens to others."""
        cut_T = (batch.position >= 16 - batch.sample % 5).astype(np.int64)
        return {"sample": np.where(cut_T, 10_000 + batch.sample, batch.sample)}

    trace = rewritten(open_trace(folder / "trace"), tmp_path / "uneven", shorter)
    made(trace, "netmoe", "1x2", to=tmp_path / "netmoe.json", method="sum")
    measured, predicted = sent(asked(tmp_path, "netmoe", trace="uneven", tokens=100, rounds=1))
    assert (measured == predicted).all()


def test_replicas_follow_the_load_as_the_plan_recorded(folder: Path) -> None:
    prepared = asked(folder, "flexmoe", trace="steps", rounds=5)
    assert prepared.work.backward
    assert list(prepared.work.steps) == [0, 1, 2, 3, 4]
    plan: Any = load_plan(folder / "flexmoe.json")
    (cohort,) = prepared.stage.scene.cohorts
    numbers = cohort.step_ids.tolist() if cohort.step_ids is not None else []
    known, ours = schedule_of(plan), prepared.work.ways[str(folder / "flexmoe.json")].schedule or {}
    assert ours  # something moves
    table = start = tables_of(plan.placement)
    for at, number in enumerate(numbers):
        table = known.get(number, table)
        held = ours.get(max((step for step in ours if step <= TURNS * at), default=-1), start)
        assert [set(row) for row in np.sort(held, axis=2).reshape(-1, 10).tolist()] == [
            set(row) for row in np.sort(table, axis=2).reshape(-1, 10).tolist()
        ]
    timed: list[Timed] = by_rank(2, ranks.run, prepared.work)
    measured = np.sum([rank.copies for rank in timed], axis=0)
    predicted = np.stack([one[COPIES][1] for one in prepared.predicted], axis=1)
    assert (measured == predicted).all()
    moves = np.max([rank.moves for rank in timed], axis=0)
    assert (moves[:, 0] == 0).all()  # nothing moves today
    assert moves[0, 1] == 0
    assert (moves[1:, 1] > 0).all()


def test_a_way_that_follows_another_schedule_sends_other_copies(folder: Path) -> None:
    """The check above sees a schedule that is not carried out."""
    prepared = asked(folder, "flexmoe", trace="steps", rounds=5)
    name = str(folder / "flexmoe.json")
    ways = {**prepared.work.ways, name: prepared.work.ways[name]._replace(schedule={})}
    measured, predicted = sent(replace(prepared, work=prepared.work._replace(ways=ways)))
    assert (measured[:, 0] == predicted[:, 0]).all()
    assert (measured[:, 1] != predicted[:, 1]).any()


@pytest.mark.parametrize("backward", [False, True])
def test_condensed_rows_are_those_that_the_plan_counts(folder: Path, backward: bool) -> None:
    measured, predicted = sent(asked(folder, *ROWS, tokens=100, rounds=2, backward=backward))
    assert (measured == predicted).all()
    exact, *condensed = measured[0].tolist()
    assert all(0 < rows < exact for rows in condensed)


def test_condensed_rows_are_counted_beside_a_plan_that_moves_samples(folder: Path) -> None:
    measured, predicted = sent(asked(folder, "netmoe", "gates", tokens=100, rounds=1))
    assert (measured == predicted).all()


def test_condensed_seconds_are_predicted_from_the_rows_that_travel(folder: Path, tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "profile.json", "1x2")
    today, gates, fp8 = asked(folder, "gates", "fp8", tokens=100, rounds=1, profile=profile).predicted
    assert gates["step_s"][1] < today["step_s"][1]
    assert fp8["exchange_s"][1] < gates["exchange_s"][1]
    assert gates["experts_s"][1] <= today["experts_s"][1]


@pytest.mark.parametrize("backward", [False, True])
def test_condensed_seconds_hold_those_of_finding_and_folding_rows(folder: Path, tmp_path: Path, backward: bool) -> None:
    """Copies and pairs are counted token by token; a profile without the case predicts as much less, and says so."""
    older, path = write_profile(tmp_path / "older.json", "1x2"), tmp_path / "profile.json"
    axes = {"rows": (16, 512), "group": (4, 64), "hidden": (64, 512), "backward": (0, 1)}
    sizes = [dict(zip(axes, size, strict=True)) for size in itertools.product(*axes.values())]
    kept = load(older)
    folds = series("condensed_rows", dtype="fp32", sizes=sizes, a_s=1e-3, b_s=1e-9)
    save(Profile.of(kept.origins[0], kept.cluster, [*kept.series.values(), folds]), path)
    settings: dict[str, Any] = {"tokens": 100, "rounds": 1, "backward": backward}
    with_it, without = (asked(folder, "eplb", "gates", profile=one, **settings) for one in (path, older))
    step, spec = with_it.work.recorded, with_it.stage.scene.model
    expected = 0.0
    for layer in range(spec.num_layers):
        rows, groups = Counter[int](), Counter[Any]()
        for ids_K, home in zip(step.ids[:, layer].tolist(), step.home.tolist(), strict=True):
            asks = {device: [one for one in ids_K if one * 2 // spec.num_experts == device] for device in (0, 1)}
            rows[home] += sum(bool(experts) for experts in asks.values())
            groups[home, tuple(sorted(asks[1 - home]))] += bool(asks[1 - home])
        pairs = {home: sum(count**2 for (where, _), count in groups.items() if where == home) for home in rows}
        sizes_D: list[dict[str, Any]] = [
            {"rows": rows[home], "group": pairs[home] / rows[home], "hidden": spec.hidden_size, "backward": backward}
            for home in rows
        ]
        expected += max(float(predict(load(path), "condensed_rows", size).seconds) for size in sizes_D)
    step_s = [np.array([one["step_s"][1].sum() for one in each.predicted]) for each in (with_it, without)]
    less = step_s[0] - step_s[1]
    assert less == pytest.approx([0, 0, expected], abs=1e-12)
    assert expected > 1e-3 * spec.num_layers
    words = (
        "no predicted seconds of finding and folding rows that stand for others: the profile has no condensed_rows;"
        " measure again: moeplan profile"
    )
    for prepared, lacks in (
        (without, True),
        (with_it, False),
        (asked(folder, "eplb", profile=older, **settings), False),  # folds no rows
    ):
        assert (words in _doubts(prepared, environment())) is lacks
    done = without.told(by_rank(2, run, without.work))
    screen = Console(width=300, record=True, file=io.StringIO())
    replay_report(done, screen)
    assert words in screen.export_text()


def test_a_plan_that_condenses_rows_needs_their_states(folder: Path, tmp_path: Path) -> None:
    rewritten(open_trace(folder / "trace"), tmp_path / "bare")
    with pytest.raises(UsageError, match="no hidden states and gate weights"):
        replay(experiment(folder, "gates", trace=str(tmp_path / "bare")))


def test_the_step_is_of_whole_samples_that_no_plan_was_fitted_to(folder: Path) -> None:
    prepared = asked(folder, "exflow", tokens=100)
    step, stage = prepared.work.recorded, prepared.stage
    samples, counts = np.unique(step.sample, return_counts=True)
    assert (counts == LENGTH).all()
    assert (len(samples) - 1) * LENGTH < 100 <= len(step.ids)
    unseen_U = stage.plans[0].unseen(stage.scene.index, stage.source.sha256, ())
    assert np.isin(samples, stage.scene.index.unit_ids[unseen_U]).all()  # type: ignore[union-attr]


def test_recorded_steps_run_one_after_another(folder: Path, tmp_path: Path) -> None:
    trace = drifting(open_trace(folder / "trace"), tmp_path / "steps")
    made(trace, "eplb", "1x2", to=tmp_path / "eplb.json", slots=9)
    prepared = asked(tmp_path, "eplb", trace="steps", rounds=3)
    assert list(prepared.work.steps) == [0, 1, 2]
    assert np.bincount(prepared.work.recorded.step).min() > 0
    measured, predicted = sent(prepared)
    assert (measured == predicted).all()
    with pytest.raises(UsageError, match="were recorded"):
        asked(tmp_path, "eplb", trace="steps", tokens=100)


@pytest.mark.parametrize("name", ["exflow", "eplb"])
def test_decoded_tokens_run_one_of_each_sequence_at_once(folder: Path, tmp_path: Path, name: str) -> None:
    decode = rewritten(
        open_trace(folder / "trace"), tmp_path / "decode", lambda batch: {"phase": phase_of(batch, "decode")}
    )
    made(decode, name, "1x2", to=tmp_path / f"{name}.json", concurrency=8, **PLANS[name])
    prepared = asked(tmp_path, name, trace="decode", tokens=20, rounds=4)
    assert np.bincount(prepared.work.recorded.step).tolist() == [20] * 4
    measured, predicted = sent(prepared)
    assert (measured == predicted).all()


def test_rows_without_samples_and_steps_run_as_a_step(folder: Path, tmp_path: Path) -> None:
    bare = rewritten(open_trace(folder / "trace"), tmp_path / "bare", lambda _: {"sample": None})
    made(bare, "eplb", "1x2", to=tmp_path / "eplb.json", slots=9)
    measured, predicted = sent(asked(tmp_path, "eplb", trace="bare", tokens=100, rounds=1))
    assert (measured == predicted).all()
    with pytest.raises(UsageError, match="samples were not recorded"):
        asked(folder, "netmoe", trace=str(tmp_path / "bare"))


def test_pairs_of_counts_run_as_tokens(folder: Path, tmp_path: Path) -> None:
    def ranked(batch: Any) -> Mapping[str, Any]:
        return {"source_rank": (batch.sample % 2).astype(np.int32)}

    tokens = rewritten(open_trace(folder / "steps"), tmp_path / "tokens", ranked)
    counts = counted(tokens, tmp_path / "counts")
    made(counts, "flexmoe", "1x2", to=tmp_path / "flexmoe.json", slots=10)
    prepared = asked(tmp_path, "flexmoe", trace="counts", rounds=4)
    assert len(prepared.work.recorded.ids) == 4 * 4 * LENGTH * tokens.model.top_k
    measured, predicted = sent(prepared)
    assert (measured == predicted).all()
    with pytest.raises(UsageError, match="counts tell no token's way"):
        asked(folder, "exflow", trace=str(tmp_path / "counts"))
    counted(open_trace(folder / "steps"), tmp_path / "homeless")
    with pytest.raises(UsageError, match="expected those of every step by 2 source ranks"):
        asked(folder, "eplb", trace=str(tmp_path / "homeless"))


def test_tokens_without_experts_are_refused(folder: Path, tmp_path: Path) -> None:
    def dropped(batch: Any) -> Mapping[str, Any]:
        ids = batch.ids.copy()
        ids[batch.position == 3, 1, 1] = NOT_ROUTED
        return {"ids": ids}

    rewritten(open_trace(folder / "trace"), tmp_path / "dropped", dropped)
    with pytest.raises(InputError, match="have no expert in some layer"):
        asked(folder, "eplb", trace=str(tmp_path / "dropped"), tokens=100)


def test_routers_read_tokens_whatever_layers_add() -> None:
    spec = model(layers=3, experts=4, top_k=2, hidden_size=16, ffn_size=8, dtype_bytes=4)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 4, (37, 3, 2)).astype(np.int32))
    layers, seen = LayersAlone(spec, ids), list[torch.Tensor]()
    layers.fill(0)
    for layer in layers.layers:
        layer.get_submodule("moe.router").register_forward_hook(lambda _m, _args, out: seen.append(out[1]))
    tokens = torch.randperm(37)[:, None]
    with torch.no_grad():
        before, after = layers.embed(tokens), layers.embed(tokens)
        for layer in layers.layers:
            after = after + layer.get_submodule("moe")(after)
    assert all((one == ids[tokens[:, 0], at]).all() for at, one in enumerate(seen))
    assert not torch.equal(before, after)  # experts do add something
    assert torch.equal(before[..., : layers.bits], after[..., : layers.bits])


def test_experts_take_recorded_states_and_gates() -> None:
    spec = model(layers=2, experts=4, top_k=2, hidden_size=16, ffn_size=8, dtype_bytes=4)
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(0, 4, (9, 2, 2)).astype(np.int32))
    states = States(torch.rand(9, 2, 2), torch.randperm(9), [torch.randn(9, 16) for _ in range(2)])
    layers, seen = LayersAlone(spec, ids, states=states), list[tuple[torch.Tensor, ...]]()
    layers.fill(0)
    for layer in layers.layers:
        layer.get_submodule("moe.experts").register_forward_pre_hook(lambda _m, args: seen.append(args))
    tokens = torch.randperm(9)[:, None]
    layers(tokens).sum().backward()
    for at, (x, experts, weights) in enumerate(seen):
        number = tokens[:, 0]
        assert torch.equal(x, states.layers[at][states.row[number]])
        assert torch.equal(weights, states.weights[number, at])
        assert torch.equal(experts, ids[number, at].long())
        assert x.requires_grad


def test_another_number_of_ranks_than_devices_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UsageError, match="3 ranks were started for plans of 2 devices"):
        replay(experiment(folder, "eplb", tokens=32))


def test_half_precision_runs_as_the_model_has_it() -> None:
    spec = model(layers=2, experts=4, top_k=2, hidden_size=32, ffn_size=8, dtype_bytes=2)
    layers = LayersAlone(spec, torch.zeros(5, 2, 2, dtype=torch.int32), torch.bfloat16)
    layers.fill(0)
    y = layers(torch.arange(5)[:, None])
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert all(own.grad is not None and own.dtype == torch.bfloat16 for own in layers.parameters())


def timed(seconds: list[list[tuple[float, float]]], moves: list[float], copies: int) -> Timed:
    """A rank's seconds by round and way, forth and back, and of moves before the second way's rounds."""
    laps: Laps = {"dispatch": [0.1, 0.2], "experts": [1.0], "combine": [0.3]}
    own = np.array(seconds)
    moved = np.stack([np.zeros(len(own)), moves], axis=1)
    sent = np.full(own.shape[:2], copies)
    return Timed(own, moved, sent, [[laps] * own.shape[1]] * len(own), Environment.of("cpu", ["here"]))


def test_gains_are_paired_by_round_and_held_against_today_run_twice() -> None:
    rounds = [[(10.0, 10.2), (8.0, 8.0)], [(20.0, 20.0), (15.0, 17.0)], [(10.0, 9.9), (9.0, 9.0)]]
    slower = [[(11.0, 10.2), (7.0, 8.5)], *rounds[1:]]
    nothing: Any = [np.zeros(1, np.int64)] * 4
    step = Recorded(np.zeros((1, 3, 2), np.uint16), *nothing)
    work: Any = Work(step, model(), {"today": Way(""), "a": Way("")}, False, [0, 0, 0], 0)
    stage: Any = SimpleNamespace(seen=False, scene=SimpleNamespace(record_steps=2, cluster=Cluster(1, 2)))
    measured = [timed(rounds, [0.0, 0.3, 0.0], 5), timed(slower, [0.0, 0.6, 0.0], 7)]
    done = Prepared(stage, work, [{}, {}]).told(measured)
    today, ours = done.ways
    ratios = [10.2 / 11.0, 1.0, 9.9 / 10.0]
    assert done.noise == pytest.approx(max(1 - min(ratios), max(ratios) - 1))
    each = 0.6 / 2 / 3  # of moves, a step: a recorded step stands for two
    gains = [1 - (16.5 + 2 * each) / 21.2, 1 - (32 + 2 * each) / 40, 1 - (18 + 2 * each) / 19.9]
    assert (ours.gain.value, ours.gain.low) == pytest.approx((np.median(gains), min(gains)))
    assert today.gain.value == 0
    assert (ours.exchange_s, ours.experts_s, ours.copies) == pytest.approx((0.6, 1.0, 12))
    assert ours.measured_s == pytest.approx((8.25, 16.3, 9.0))
    assert done.gaining == (["a"] if min(gains) > done.noise else [])


def replayed(**ours: Any) -> Replayed:
    """A replay of a plan beside today."""
    span = Span(0.01, 0.009, 0.011)
    way: dict[str, Any] = {"step": span, "exchange_s": 0.004, "experts_s": 0.005, "copies": 1234.0, "predicted": {}}
    ways = Ran(name="today", gain=Span(0, 0, 0), **way), Ran(name="a.json", **(way | {"gain": span} | ours))
    return Replayed(10, (0,), seen=True, backward=True, noise=0.001, ways=ways)


def test_experts_that_memory_does_not_hold_are_refused_before_ranks_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = experiment(folder, "eplb")
    spec, stage = prepare(asked).stage.scene.model, prepare(asked).stage
    slots = spec.num_experts + 2 * 9  # of today, and of the plan on two devices
    needed = slots * spec.num_layers * 3 * known(spec.ffn_size) * known(spec.hidden_size) * known(spec.dtype_bytes)
    assert sum(int(one.journey.placement.slots.sum()) for one in stage.contenders) == slots
    monkeypatch.setattr(job, "run_world", lambda *_args, **_more: None)
    for memory, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(job, "memory_bytes", lambda memory=memory: memory)
        with contextlib.nullcontext() if fits else pytest.raises(UsageError, match="GB of memory here"):
            assert replay(asked) is None


@pytest.mark.parametrize(
    ("gain", "words", "undecided"),
    [
        (Span(-0.01, -0.011, -0.009), "slower than today by more than the noise", False),
        (Span(0.0005, -0.0002, 0.002), "no difference from today above the noise", True),
        (Span(0.01, 0.009, 0.011), "faster than today by more than the noise", False),
    ],
)
def test_a_sure_loss_is_one_and_more_rounds_are_advised_only_where_they_may_tell(
    gain: Span, words: str, undecided: bool
) -> None:
    done = replayed(gain=gain)
    assert words in done.verdict(done.ways[1])
    assert done.undecided is undecided
    assert bool(done.gaining) is words.startswith("faster")


def test_a_screen_without_predictions_names_what_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    replay_report(replayed(), Console(width=200))
    said = capsys.readouterr().out
    assert (
        "replayed here, a.json: -1.0 % of the step (-1.1 % to -0.9 %) in the median round: faster than today by more"
        " than the noise of 0.1 %"
    ) in " ".join(said.split())
    assert "predicted" not in said
    assert "NOISY" not in said
    assert "10 tokens that plans were fitted to" in said
    assert "1,234" in said
    replay_report(replace(replayed(), noise=0.101), Console(width=200))
    assert "no difference from today above the noise of 10.1 %, a NOISY machine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ours", "noise", "more", "words"),
    [
        ({}, 0.2, 20, "again when this machine is quiet; until then keep what runs today"),
        ({}, 0.05, 20, "again with --rounds 20, which shows smaller gains; until then keep what runs today"),
        ({}, 0.05, None, "nothing to apply: keep what runs today"),
        ({"gain": Span(-0.4, -0.5, -0.3)}, 0.2, 20, "nothing to apply: keep what runs today"),
    ],
)
def test_a_replay_in_which_no_plan_gains_says_what_to_try(
    ours: dict[str, Any], noise: float, more: int | None, words: str
) -> None:
    assert after_replay(replace(replayed(**ours), noise=noise), {}, more_rounds=more) == words


def test_a_plan_that_gains_is_applied_as_it_was_asked_for_and_by_force_where_its_own_verdict_asks(folder: Path) -> None:
    plan = load_plan(folder / "eplb.json")
    for value, forced in (("benefit", ""), ("none", " --force")):
        judged = plan.model_copy(update={"verdict": known(plan.verdict).model_copy(update={"value": value})})
        assert after_replay(replayed(), {"a.json": judged}, more_rounds=None) == f"moeplan apply a.json{forced}"


def test_a_step_of_fewer_tokens_than_asked_for_says_how_many_run(folder: Path) -> None:
    prepared = asked(folder, "eplb", tokens=10_000)
    run = len(prepared.work.recorded.ids)
    line, *_ = _doubts(prepared, environment())
    assert line == (
        f"a step has {run:,} of the 10,000 tokens asked for: no more samples that no plan was fitted to; record more"
    )
    for enough in (asked(folder, "eplb", tokens=run), asked(folder, "eplb")):
        assert [*_doubts(enough, environment())] == [AGAIN]


def test_a_replay_with_a_profile_says_which_seconds_that_lacks_and_asks_for_no_other(
    folder: Path, tmp_path: Path
) -> None:
    whole = write_profile(tmp_path / "whole.json", "1x2", cases=("all_to_all", "expert_ffn"))
    save(measured_profile(Cluster(1, 2), series("all_to_all", 2, "intra")), bare := tmp_path / "bare.json")
    experts = "no predicted seconds of experts: the profile has no expert_ffn"
    gathering = "no predicted seconds of gathering K and V: no all_gather of 2 ranks"
    for name, profile, lacking in (
        ("eplb", whole, []),  # attention is left out, and K and V stay where they are
        ("eplb", bare, [experts]),
        ("exflow", bare, [experts, gathering]),
    ):
        said = [*_doubts(asked(folder, name, tokens=100, profile=profile), environment(device="GPU"))]
        told = [line for line in said if line.startswith("no predicted seconds")]
        assert len(told) == len(lacking)
        assert all(line.startswith(words) for line, words in zip(told, lacking, strict=True))
        assert AGAIN not in said


def test_a_link_given_beside_the_plans_own_profile_predicts_as_in_compare(folder: Path, tmp_path: Path) -> None:
    profile, cluster = write_profile(tmp_path / "profile.json", "1x2"), Cluster.parse("1x2", ["intra=1:9"])
    made(open_trace(folder / "trace"), "eplb", cluster, profile=profile, to=tmp_path / "eplb.json", slots=9)
    settings: dict[str, Any] = {"tokens": 100, "trace": str(folder / "trace")}
    assert asked(tmp_path, "eplb", profile=profile, **settings).stage.scene.cluster == cluster
    other = write_profile(tmp_path / "other.json", "1x2", noise=0.2)
    assert asked(tmp_path, "eplb", profile=other, **settings).stage.scene.cluster == load(other).cluster


def test_hardware_that_was_not_measured_is_told(folder: Path) -> None:
    prepared, ranks = asked(folder, "eplb", tokens=100), environment(device="GPU", num_hosts=2)
    costs: Any = SimpleNamespace(missing={}, noisy=("attention", "dispatch"))
    scene: Any = SimpleNamespace(costs=costs, cluster=Cluster(2, 2))
    prepared = replace(prepared, stage=replace(prepared.stage, scene=scene))
    noisy = "predicted by curves of a NOISY machine: exchanges; profile again when it is quiet"
    for profile, words in (
        (measured_profile(Cluster(2, 2)), None),
        (measured_profile(Cluster(1, 4)), "the profile is of GPU (1 host); these ranks run on GPU (2 hosts)"),
        (measured_profile(Cluster(2, 2), device="H200"), "the profile is of H200 (2 hosts); these ranks run on GPU"),
        (describe("2x2"), "the profile is of 2x2 (described, not measured); these ranks run on GPU (2 hosts)"),
    ):
        *other, last = _doubts(replace(prepared, profile=profile), ranks)
        assert last == noisy
        assert len(other) == (words is not None)
        assert not other or other[0].startswith(f"predicted for other hardware: {words}")
    scene.cluster = Cluster(3, 2)
    first, *_ = _doubts(prepared, ranks)
    assert first == "3 nodes run on 2 hosts: what is sent between them here crosses no link of the cluster"


def test_a_screen_of_several_steps_tells_each(capsys: pytest.CaptureFixture[str]) -> None:
    done = replayed(measured_s=(0.02, 0.03), predicted_s=(0.021, 0.029), predicted={"step_s": Span(0.025, 0.02, 0.03)})
    ways = (replace(done.ways[0], measured_s=(0.04, 0.05)), done.ways[1])
    replay_report(replace(done, steps=(0, 1), ways=ways), Console(width=200))
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["step", "today", "a.json", "predicted"] in said
    assert ["1", "50.0", "30.0", "29.0"] in said


def test_figures_are_shown_before_they_are_kept_and_the_best_plan_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    done, plans = replayed(), [folder / f"{name}.json" for name in ("eplb", "exflow")]
    gains = Span(0.01, 0.009, 0.011), Span(0.02, 0.019, 0.021)
    ways = [replace(done.ways[1], name=str(plan), gain=gain) for plan, gain in zip(plans, gains, strict=True)]
    done = replace(done, ways=(done.ways[0], *ways))
    loaded, source = {str(plan): load_plan(plan) for plan in plans}, FileInput(path="trace", sha256="0" * 64)
    measured = Measured(done, loaded, source, None, environment())
    monkeypatch.setattr(job, "replay", lambda *_asked, **_more: measured)
    for full in (False, True):
        monkeypatch.setattr(job, "save", mock.Mock(return_value=[], side_effect=OSError("disk full") if full else None))
        with pytest.raises(OSError, match="disk full") if full else contextlib.nullcontext():
            command(plans, save=True)
        said = " ".join(capsys.readouterr().out.split())
        assert "replayed here" in said
        assert (f"next: moeplan apply {plans[1]}" in said) is not full


def test_a_gain_stands_beside_the_one_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    done = replayed(predicted={"step_s": Span(0.015, 0.01, 0.02)})
    ways = replace(done.ways[0], predicted={"step_s": Span(0.02, 0.01, 0.03)}), done.ways[1]
    replay_report(replace(done, ways=ways), Console(width=200))
    assert "(-1.1 % to -0.9 %; predicted -25.0 %)" in capsys.readouterr().out


def test_what_does_not_run_alone_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing"):
        replay(experiment(folder, "eplb", trace="nothing"))
    with pytest.raises(UsageError, match="coherent tokens are not trained"):
        replay(experiment(folder, "exflow", backward=True))
    with pytest.raises(UsageError, match="replay them one at a time"):
        replay(experiment(folder, "flexmoe", "netmoe", trace="steps"))
    with pytest.raises(UsageError, match="no steps were recorded"):
        replay(experiment(folder, "flexmoe"))


def test_the_command_tells_and_keeps_all_figures_and_exits_by_them(folder: Path, tmp_path: Path) -> None:
    flags = ("--trace", "trace", "--rounds", "2", "--tokens-per-step", "64", "--backward", "--json", "--save")
    done = python(*MAIN, "replay", "eplb.json", "netmoe.json", *flags, cwd=folder)
    told = json.loads(done.stdout)
    assert [way["name"] for way in told["ways"]] == ["today", "eplb.json", "netmoe.json"]
    assert all(way["step"]["low"] <= way["step"]["value"] <= way["step"]["high"] for way in told["ways"])
    gains = any(way["gain"]["low"] > told["noise"] for way in told["ways"][1:])
    assert done.returncode == (0 if gains else 8)
    assert gains or "no gain above the noise" in done.stderr
    kept = json.loads((folder / "netmoe.replay.json").read_text())
    assert kept["replayed"] == told | {"ways": [told["ways"][0], told["ways"][2]]}
    shown = python(*MAIN, "show", "netmoe.json", cwd=folder).stdout
    assert f"netmoe.json: {-100 * told['ways'][2]['gain']['value']:+.1f} % of the step" in shown
    plan, path = load_plan(folder / "netmoe.json"), folder / "netmoe.json"
    other = tmp_path / "netmoe.json"
    beside(other).write_bytes(beside(path).read_bytes())
    assert replayed_sections(plan, other)[0].body[0] == replayed_sections(plan, path)[0].body[0]
    (section,) = replayed_sections(load_plan(folder / "eplb.json"), other)
    assert "replay it anew: moeplan replay" in str(section.body)
    beside(other).write_text(beside(path).read_text().replace('"schema_version": 1', '"schema_version": 2'))
    assert "schema version 2" in str(replayed_sections(plan, other)[0].body)
    assert replayed_sections(plan, tmp_path / "another.json") == []


@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_a_replay_that_is_cut_off_ends_with_one_line_and_leaves_no_process(folder: Path, how: str) -> None:
    flags = ("--trace", "trace", "--rounds", "1000", "--tokens-per-step", "64")
    process = started("replay", "eplb.json", *flags, cwd=folder)
    wait_until_said(process, "round 2 of")
    living = grandchildren(process.pid)
    assert len(living) == 2
    if how == "killed":
        os.kill(living[1], signal.SIGKILL)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == RankError.exit_code
    else:
        said = ended(process, signal.SIGINT, 130)
    (line,) = [line for line in said.splitlines() if "round" not in line]
    assert line.startswith("moeplan: interrupted; " if how == "interrupted" else "moeplan: rank 1 died (SIGKILL)")
    assert not [pid for pid in living if Path(f"/proc/{pid}").exists()]


def grandchildren(pid: int) -> list[int]:
    """The ranks of a command: its nursery's children."""
    parent = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            parent[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return sorted(child for child, above in parent.items() if parent.get(above) == pid)


@pytest.mark.parametrize(
    ("names", "flags"),
    [(["eplb", "netmoe", "fp8"], ["--trace", "trace", "--tokens-per-step", "64"]), (["flexmoe"], ["--trace", "steps"])],
)
def test_ranks_of_torchrun_replay_together_and_one_tells(folder: Path, names: list[str], flags: list[str]) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *MAIN)
    plans = [f"{name}.json" for name in names]
    done = python(*launch, "replay", *plans, *flags, "--rounds", "2", "--json", "--save", cwd=folder)
    told = json.loads(done.stdout)  # of one rank alone
    assert [way["name"] for way in told["ways"]] == ["today", *plans]
    for plan, way in zip(plans, told["ways"][1:], strict=True):
        kept = json.loads(beside(folder / plan).read_text())
        assert kept["environment"]["num_ranks"] == 2
        assert kept["replayed"]["ways"] == [told["ways"][0], way]
        assert way["copies"] == way["predicted"][COPIES]["value"]
