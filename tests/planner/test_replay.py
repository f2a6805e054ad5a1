"""`moeplan replay`: what runs is what was recorded, on real ranks, and costs what the evaluator counts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeplan.errors import InputError, UsageError
from moeplan.planner.demo.text import other_text, record_embedded
from moeplan.planner.evaluate.evaluate import evaluate
from moeplan.planner.evaluate.metrics import COPIES
from moeplan.planner.loaded_plan import LoadedPlan, load_plans
from moeplan.planner.replay import job
from moeplan.planner.replay.job import Ran, Replayed, Span, Timed, Work, replay
from moeplan.planner.replay.model import LayersAlone
from moeplan.planner.replay.report import replay_report
from moeplan.profilers.stopwatch import Laps
from moeplan.profilers.world import World
from moeplan.runtime import load_plan, parallelize
from moeplan.traces.reader import Trace
from tests.builders import known, model
from tests.planner.cli.conftest import MAIN, python
from tests.planner.makers import made
from tests.runtime.worlds import by_rank

LENGTH, SAMPLES = 16, 24
PLANS: dict[str, dict[str, Any]] = {
    "exflow": {"time_limit_s": 0.5},
    "eplb": {"slots": 9},
    "netmoe": {"method": "sum"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of the embedded model, and plans for two devices."""
    folder = tmp_path_factory.mktemp("replay")
    trace = record_embedded(other_text()[: LENGTH * SAMPLES], folder / "trace", sample_tokens=LENGTH)
    for name, settings in PLANS.items():
        made(trace, name, "1x2", **settings).save(folder / f"{name}.json")
    return folder


def carried(world: World, given: tuple[Work, str]) -> tuple[int, list[tuple[int, int, list[list[int]]]]]:
    """Copies that a rank sends, and the experts of its tokens by layer, sample and position."""
    work, path = given
    plan = load_plan(path)
    layers = LayersAlone(work.spec, torch.from_numpy(work.step.ids.astype(np.int32)))
    spread = parallelize(layers.eval(), plan)
    layers.fill(world.rank)
    spread(*job._inputs(work.step, world.rank, flat=plan.dispatch_model == "standard"))
    told = [(layer, len(routed.ids), sorted(routed.ids.tolist())) for layer, routed in enumerate(spread.routed)]
    return spread.traffic.copies, told


def asked(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Work, Any, LoadedPlan]:
    """The work of a replay, its scene and its plan."""
    kept: dict[str, Any] = {}

    def no_world(_ranks: int, _target: Callable[..., Any], work: Work, **_: Any) -> None:
        kept["work"] = work

    recorded = job._recorded
    monkeypatch.setattr(job, "run_world", no_world)
    monkeypatch.setattr(job, "_recorded", lambda *given: kept.update(scene=given[2]) or recorded(*given))
    assert replay([folder / f"{name}.json"], folder / "trace", tokens=100) is None
    return kept["work"], kept["scene"], load_plans([folder / f"{name}.json"])[0]


@pytest.mark.parametrize("name", PLANS)
def test_every_token_goes_to_its_recorded_experts_as_the_evaluator_counts(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, scene, plan = asked(folder, name, monkeypatch)
    ranks = by_rank(2, carried, (work, plan.path))
    for layer in range(work.spec.num_layers):
        found = [ids for _, told in ranks for at, _, rows in told if at == layer for ids in rows]
        assert sorted(found) == sorted(work.step.ids[:, layer].tolist())
    (row,) = evaluate(scene, [plan.contender]).evaluation.fit.contenders
    expected = row.metrics[COPIES].value * len(work.step.ids) * work.spec.num_layers
    assert sum(copies for copies, _ in ranks) == pytest.approx(expected)


def test_the_step_is_of_whole_samples_that_no_plan_was_fitted_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, scene, plan = asked(folder, "exflow", monkeypatch)
    samples, counts = np.unique(work.step.sample, return_counts=True)
    assert counts.tolist() == [LENGTH - 1] * len(samples) or counts.tolist() == [LENGTH] * len(samples)
    assert (len(samples) - 1) * counts[0] < 100 <= len(work.step.ids)
    unseen = plan.unseen(scene.index, scene.source.sha256, ())
    assert unseen[samples].all()


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


def test_another_number_of_ranks_than_devices_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UsageError, match="3 ranks were started for plans of 2 devices"):
        replay([folder / "eplb.json"], folder / "trace")


def test_half_precision_runs_as_the_model_has_it() -> None:
    spec = model(layers=2, experts=4, top_k=2, hidden_size=32, ffn_size=8, dtype_bytes=2)
    layers = LayersAlone(spec, torch.zeros(5, 2, 2, dtype=torch.int32), torch.bfloat16)
    layers.fill(0)
    y = layers(torch.arange(5)[:, None])
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert all(own.grad is not None and own.dtype == torch.bfloat16 for own in layers.parameters())


def timed(seconds: list[list[tuple[float, float]]]) -> Timed:
    """A rank's seconds by round and way, forth and back."""
    laps: Laps = {"dispatch": [0.1, 0.2], "experts": [1.0], "combine": [0.3]}
    return Timed(np.array(seconds), [[laps] * len(seconds[0])] * len(seconds))


def test_gains_are_paired_by_round_and_held_against_today_run_twice() -> None:
    rounds = [[(10.0, 10.2), (8.0, 8.0)], [(20.0, 20.0), (15.0, 17.0)], [(10.0, 9.9), (9.0, 9.0)]]
    slower = [[(11.0, 10.2), (7.0, 8.5)], *rounds[1:]]
    work: Any = Work(known(step()), model(), {"today": "", "a": ""}, False, 3, 0)
    done = job._told(work, [timed(rounds), timed(slower)], [{}, {}], num_samples=1, seen=False)
    today, ours = done.ways
    ratios = [10.2 / 11.0, 1.0, 9.9 / 10.0]
    assert done.noise == pytest.approx(max(1 - min(ratios), max(ratios) - 1))
    gains = [1 - (8.0 + 8.5) / (11.0 + 10.2), 1 - 32 / 40, 1 - 18 / 19.9]
    assert (ours.gain.value, ours.gain.low) == pytest.approx((np.median(gains), min(gains)))
    assert today.gain.value == 0
    assert (ours.exchange_s, ours.experts_s) == pytest.approx((0.6, 1.0))
    assert done.gaining == (["a"] if min(gains) > done.noise else [])


def step() -> job.Recorded:
    """One token."""
    return job.Recorded(np.zeros((1, 3, 2), np.uint16), *(np.zeros(1, np.int64) for _ in range(3)))


def test_a_screen_without_predictions_names_what_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    span = Span(0.01, 0.009, 0.011)
    ways = [Ran("today", span, 0.004, 0.005, Span(0, 0, 0), {}), Ran("a.json", span, 0.004, 0.005, span, {})]
    replay_report(Replayed(10, 2, seen=True, backward=True, noise=0.001, ways=ways), Console(width=200))
    said = capsys.readouterr().out
    assert "a.json: -1.0 % of the step (-1.1 % to -0.9 %), above the noise of 0.1 %" in said
    assert "predicted" not in said.split("for predictions")[0]
    assert "fitted samples" in said


def test_what_does_not_run_alone_is_refused(folder: Path, tmp_path: Path, trace: Trace) -> None:
    made(trace, "luffy", "1x2", condense=0.05).save(tmp_path / "rows.json")
    with pytest.raises(UsageError, match="rows stand for others"):
        replay([tmp_path / "rows.json"], tmp_path / "states")
    with pytest.raises(InputError, match="nothing"):
        replay([folder / "eplb.json"], tmp_path / "nothing")
    with pytest.raises(UsageError, match="coherent tokens are not trained"):
        replay([folder / "exflow.json"], folder / "trace", backward=True)


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """A trace with hidden states."""
    text = other_text()[: LENGTH * SAMPLES]
    return record_embedded(text, tmp_path / "states", sample_tokens=LENGTH, weights=True, embeddings="all")


def test_the_command_tells_all_figures_and_exits_by_them(folder: Path) -> None:
    flags = ("--trace", "trace", "--rounds", "2", "--tokens-per-step", "64", "--backward", "--json")
    done = python(*MAIN, "replay", "eplb.json", "netmoe.json", *flags, cwd=folder)
    told = json.loads(done.stdout)
    assert [way["name"] for way in told["ways"]] == ["today", "eplb.json", "netmoe.json"]
    assert all(way["step"]["low"] <= way["step"]["value"] <= way["step"]["high"] for way in told["ways"])
    gains = any(way["gain"]["low"] > told["noise"] for way in told["ways"][1:])
    assert done.returncode == (0 if gains else 8)
    assert gains or "no gain above the noise" in done.stderr
