"""The demo on real processes, and what it must show."""

import ctypes
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
from rich.console import Console

from moeplan.errors import UsageError
from moeplan.planner.certify import certify
from moeplan.planner.demo import job
from moeplan.planner.demo.job import Demo, RankFigures, Trial, run_demo
from moeplan.planner.demo.report import demo_report, exact, interval_words
from moeplan.planner.evaluate.metrics import COPIES, EXCHANGE, EXPERTS
from moeplan.profilers.profile import load
from moeplan.profilers.stopwatch import Part
from moeplan.runtime.engine.traffic import Traffic
from moeplan.runtime.plan import Metric
from moeplan.runtime.plan import load as load_plan
from moeplan.solvers.precompile import GROUPS
from tests.builders import known


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(job, "ROUNDS", 2)  # seconds are none of what is tested
        return run_demo(tmp_path_factory.mktemp("demo") / "out")


def test_ctrl_c_is_not_answered_by_the_processes_that_compile(tmp_path: Path, monkeypatch: Any) -> None:
    """Each would print a traceback of its own; they are killed as the demo ends."""
    compiler, before = tmp_path / "python", signal.pthread_sigmask(signal.SIG_BLOCK, ())
    blocked = "signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())"
    compiler.write_text(
        f"#!{sys.executable} -I\nimport pathlib, signal, sys\n"
        f"pathlib.Path({str(tmp_path)!r}, sys.argv[-1] + '.txt').write_text(str({blocked}))\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(compiler))
    job.compile_solvers()
    assert {path.stem: path.read_text() for path in tmp_path.glob("*.txt")} == dict.fromkeys(GROUPS, "True")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize(
    "loaded",
    [
        Mock(side_effect=TypeError("argument of type 'NoneType' is not iterable")),  # Windows
        Mock(side_effect=OSError("Dynamic loading not supported")),  # a static build
        Mock(return_value=object()),  # macOS, musl
    ],
)
def test_memory_is_kept_where_the_c_library_can_and_else_nothing_is_done(loaded: Mock, monkeypatch: Any) -> None:
    monkeypatch.setattr(job, "KEPT_BYTES", -1)  # refused where it is asked for
    monkeypatch.setattr(ctypes, "CDLL", loaded)
    job._keep_memory()
    monkeypatch.setattr(ctypes, "CDLL", library := Mock())
    with pytest.raises(ValueError, match="negative dimensions"):
        job._keep_memory()
    assert library.return_value.mallopt.call_args_list == [
        call(job.M_MMAP_MAX, 0),
        call(job.M_TRIM_THRESHOLD, 2**31 - 1),
    ]


def test_ctrl_c_ends_it(tmp_path: Path, monkeypatch: Any) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "compile_solvers", lambda: None)
    monkeypatch.setattr(job, "_plan_embedded", Path.mkdir)
    monkeypatch.setattr(job, "plan_published", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path / "demo")
    assert not [*tmp_path.iterdir()], "a second demo is refused by what the first left"


def test_measured_seconds_are_the_medians_of_whole_layers() -> None:
    """Of sums, as a profile's are: the sum of medians is less where a part now and then takes long."""
    draw = np.random.default_rng(0).random
    laps_DRN: dict[Part, Any] = {"dispatch": draw((2, 3, 4)), "combine": draw((2, 3, 2)), "experts": draw((2, 3, 2))}
    rounds = [
        [{part: laps[rank, turn].tolist() for part, laps in laps_DRN.items()} for turn in range(3)] for rank in (0, 1)
    ]
    run = job._measured(Trial("one", Path()), [RankFigures(0.0, 0, Traffic(), laps) for laps in rounds], num_layers=2)
    dispatch, combine, experts = (laps.max(axis=0) for laps in laps_DRN.values())
    exchange = [
        [out[0] + out[1] + back[0], out[2] + out[3] + back[1]] for out, back in zip(dispatch, combine, strict=True)
    ]
    assert run.exchange_s == pytest.approx(sum(sorted(layer)[1] for layer in zip(*exchange, strict=True)))
    assert run.experts_s == pytest.approx(sum(sorted(layer)[1] for layer in experts.T))


def test_every_run_gives_the_outputs_and_the_routing_of_a_single_process(demo: Demo) -> None:
    assert [run.name.split()[0] for run in demo.runs] == ["today", "placement", "pipeline", "samples"]
    assert all(run.misrouted == 0 for run in demo.runs)
    assert all(run.largest_difference < 1e-3 for run in demo.runs)  # float32 logits of about 20
    assert exact(demo)


def test_copies_and_bytes_are_those_of_a_replay_to_the_last_one(demo: Demo) -> None:
    for run, foretold in zip(demo.runs, demo.replayed, strict=True):
        assert run.copies == pytest.approx(foretold.metrics[COPIES].value * demo.num_tokens * 6, rel=1e-12)
        assert run.payload_bytes == pytest.approx(foretold.metrics["intra_bytes"].value, rel=1e-12)
        assert run.kv_bytes == (foretold.metrics["kv_bytes"].value if "kv_bytes" in foretold.metrics else 0)
        assert run.exchange_s > 0
        assert run.experts_s > 0
        for predicted in map(foretold.metrics.get, (EXCHANGE, EXPERTS)):
            assert 0 < known(known(predicted).low) <= known(predicted).value <= known(known(predicted).high)


def test_each_plan_does_something_else(demo: Demo) -> None:
    today, placed, piped, moved = demo.runs
    assert placed.payload_bytes < 0.9 * today.payload_bytes
    assert placed.kv_bytes == demo.num_tokens * 6 * 3 * 32 * 4
    assert piped.payload_bytes == today.payload_bytes
    assert moved.copies < today.copies
    names = ("today", "placement", "pipeline", "samples")
    decided = [load_plan(demo.folder / f"{name}.json").decisions.names for name in names]
    assert decided == [("placement",), ("placement",), ("pipeline",), ("sample_policy",)]


def test_a_run_that_differs_is_said(demo: Demo) -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"copies": 1},
        {"payload_bytes": 1},
        {"kv_bytes": 1},
        {"misrouted": 1},
        {"largest_difference": 0.1},
    )
    for changes in wrong:
        other = replace(demo, runs=[*demo.runs[:3], replace(demo.runs[3], **changes)])
        assert not exact(other)
        console = Console(width=100, record=True, highlight=False)
        demo_report(other, console)
        assert "differ from what was predicted" in console.export_text()


def test_the_plan_for_published_hardware_certifies_and_decode_stands_beside(demo: Demo) -> None:
    plan = demo.prefill
    certificate = certify(plan, demo.folder / "gpt-oss-20b", demo.folder / "h200_sxm.json", folder=demo.folder)
    assert "metrics of every contender" in certificate.checks
    assert plan.verdict is not None
    assert plan.verdict.value == "benefit"
    assert plan.options["evaluation"]["tokens_per_step"] == 16_384
    assert demo.decode.options["evaluation"]["concurrency"] == 1_024
    assert json.loads((demo.folder / "plan.json").read_text())["plan_sha256"] == plan.plan_sha256


@pytest.mark.parametrize("width", [80, 120])
def test_its_screen_has_forty_lines_at_most_and_fits(demo: Demo, width: int) -> None:
    console = Console(width=width, record=True, highlight=False)
    demo_report(demo, console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 40 + 5 * (width == 80)
    text = " ".join(lines)
    for words in ("% of today", "decode", "pipeline", "copies", "measured over predicted"):
        assert words in text
    assert "every copy and byte" in " ".join(lines[-6:])


def test_what_a_run_is_predicted_from_was_measured_at_sizes_of_a_grid_and_on_as_many_ranks(demo: Demo) -> None:
    beside = load(demo.folder / "profile-beside-run.json")
    assert {series.case for series in beside.series.values()} == {
        "routed_block",
        "routed_exchange",
        "all_to_all",
    }
    assert known(beside.environment).num_ranks == job.CLUSTER.num_devices
    samples = {len(one.samples_s) for series in beside.series.values() for one in series.measurements}
    assert samples == {2 * len(demo.runs)}, "one call of each size before each forward"


def test_an_interval_wider_than_a_factor_of_three_is_useless_and_others_count_what_lies_within() -> None:
    narrow, wide = Metric(value=2.0, low=1.0, high=3.0), Metric(value=2.0, low=1.0, high=3.01)
    assert (
        interval_words([(1.0, narrow), (3.5, narrow), (3.0, None)])
        == "1 of 2 within 0.50 to 1.50, the fit's error alone"
    )
    assert interval_words([(1.0, narrow), (2.0, wide)]) == "useless: the interval spans a factor of 3.01"
    assert interval_words([(1.0, None)]) == "not predicted"
    assert "useless" in interval_words([(1.0, Metric(value=2.0, low=0.0, high=3.0))])


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(UsageError, match="not empty"):
        run_demo(tmp_path)
