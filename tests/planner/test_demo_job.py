"""The main job on real processes, and what it must show."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from moeplan.errors import UsageError
from moeplan.planner.demo import job
from moeplan.planner.demo.job import Demo, run_demo
from moeplan.planner.demo.report import demo_report, interval_words
from moeplan.planner.evaluate.metrics import COPIES, EXCHANGE, EXPERTS
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.harness import Place, Start, Step
from moeplan.profilers.measurement import Measurement
from moeplan.profilers.profile import load
from moeplan.runtime.active import load_plan
from moeplan.runtime.plan import Metric
from moeplan.solvers.outcome import Status
from tests.builders import environment, known


@pytest.mark.parametrize("measured", [False, True])
def test_ctrl_c_while_it_measures_or_searches_ends_it(tmp_path: Path, monkeypatch: Any, measured: bool) -> None:
    profile = SimpleNamespace(complete=measured, cluster=Cluster.parse("1x4"))
    monkeypatch.setattr("moeplan.profilers.measure.measure", lambda **_: profile)
    monkeypatch.setattr("moeplan.profilers.profile.save", lambda *_: None)
    monkeypatch.setattr(job, "record_embedded", lambda *_: None)
    interrupted = SimpleNamespace(outcome={"placement": SimpleNamespace(status=Status.INTERRUPTED)})
    monkeypatch.setattr(job, "solve", lambda _: interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return run_demo(tmp_path_factory.mktemp("demo") / "out")


def test_every_run_gives_the_outputs_and_the_routing_of_the_single_process(demo: Demo) -> None:
    runs = [(name, model) for model in ("coherent", "standard") for name in ("contiguous", "plan")]
    assert [(run.name, run.dispatch_model) for run in demo.runs] == runs
    assert all(run.misrouted == 0 for run in demo.runs)
    assert all(run.largest_difference < 1e-3 for run in demo.runs)  # float32 logits of about 20


def test_measured_copies_are_those_of_a_replay_and_predicted_seconds_stand_beside(demo: Demo) -> None:
    for run, foretold in zip(demo.runs, demo.replayed, strict=True):
        assert run.copies == pytest.approx(foretold.metrics[COPIES].value, rel=1e-12)
        assert run.exchange_s > 0
        assert run.experts_s > 0
        for predicted in map(foretold.metrics.get, (EXCHANGE, EXPERTS)):
            assert 0 < known(known(predicted).low) <= known(predicted).value <= known(known(predicted).high)


def test_the_plan_moves_fewer_bytes_than_contiguous_in_coherent(demo: Demo) -> None:
    before, after, *_ = demo.runs
    assert after.payload_bytes < 0.9 * before.payload_bytes
    assert after.kv_bytes == before.kv_bytes == demo.num_tokens * 6 * 3 * 32 * 4
    spec = demo.plan.model
    for run in demo.runs:
        assert run.payload_bytes == round(run.copies * demo.num_tokens * 6) * (spec.hidden_size or 0) * 4


def test_the_files_are_where_it_says(demo: Demo) -> None:
    files = {"profile.json", "profile-beside-run.json", "traces", "plan.json", ".moeplan", "other-traces"}
    assert {path.name for path in demo.folder.iterdir()} == files
    active = load_plan(demo.folder / ".moeplan" / "active.json")
    assert active.model_dump(exclude={"folder"}) == demo.plan.model_dump()
    assert json.loads((demo.folder / "profile.json").read_text())["complete"]


@pytest.mark.parametrize("width", [80, 120])
def test_its_report_fits_the_screen_and_names_every_run(demo: Demo, width: int) -> None:
    console = Console(width=width, record=True, highlight=False)
    demo_report(demo, console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    for words in ("plan, coherent", "contiguous, standard", "K and V", "saves nothing", "ms a forward", "ratio"):
        assert words in text


def test_what_a_run_is_predicted_from_was_measured_at_sizes_of_a_grid_and_on_as_many_ranks(demo: Demo) -> None:
    beside = load(demo.folder / "profile-beside-run.json")
    assert {series.case for series in beside.series.values()} == {"routed_block", "routed_exchange"}
    assert known(beside.environment).num_ranks == demo.plan.cluster.num_devices
    assert not set(beside.series) & {"expert_ffn/fp32", "all_to_all/uint8@4/intra"}


def test_an_interval_wider_than_a_factor_of_three_is_useless_and_others_count_what_lies_within() -> None:
    narrow, wide = Metric(value=2.0, low=1.0, high=3.0), Metric(value=2.0, low=1.0, high=3.01)
    assert interval_words([(1.0, narrow), (3.5, narrow), (3.0, None)]) == "1 of 2 measured lie within the interval"
    assert interval_words([(1.0, narrow), (2.0, wide)]) == "useless: the interval spans a factor of 3.01"
    assert interval_words([(1.0, None)]) == "not predicted"
    assert "useless" in interval_words([(1.0, Metric(value=2.0, low=0.0, high=3.0))])


def test_a_round_goes_on_where_the_one_before_it_ended() -> None:
    places = [Place("gemm", "fp32", 1, None, (("m", number),)) for number in range(3)]
    start = Start(environment(), ("host",), dict.fromkeys(places, 1))
    one = Measurement.of({"m": 1}, 1, [1.0])
    steps = [Step(place, one, 1.0, 1, 3, 0.0) for place in places]
    assert job._swept([]) == frozenset()
    assert job._swept([start, *steps[:2]]) == frozenset(places[:2])
    assert job._swept([start, *steps]) == frozenset()
    assert job._swept([start, *steps, start, steps[1]]) == {places[1]}


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(UsageError, match="not empty"):
        run_demo(tmp_path)
