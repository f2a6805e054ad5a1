import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.errors import InputError, MismatchError, UsageError
from moeplan.planner.compare.comparison import Comparison, compare
from moeplan.planner.compare.report import as_dict
from moeplan.planner.request import Request
from moeplan.planner.solve import make
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Metric, load, save
from moeplan.traces.reader import open_trace
from moeplan.traces.schema import TraceMeta
from moeplan.traces.writer import TraceWriter
from tests.planner.edits import edited
from tests.planner.pipeline.pipelines import training

Array = NDArray[Any]


def planned(trace: Any, path: Path, **changes: Any) -> Path:
    settings: dict[str, Any] = {"strategy": "exflow", "trace": str(trace.path), "cluster": Cluster.parse("2x2")}
    make(Request(**settings | changes)).save(path)
    return path


@pytest.fixture(scope="module")
def trace(make_trace: Any) -> Any:
    """A trace of four steps a part on 2x2."""
    return make_trace(samples=130, tokens=12)


@pytest.fixture(scope="module")
def home(trace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans by three strategies."""
    folder = tmp_path_factory.mktemp("plans")
    planned(trace, folder / "exflow.json", objective="copies")
    planned(trace, folder / "eplb.json", strategy="eplb", redundant=4)
    planned(trace, folder / "contiguous.json", strategy="contiguous")
    return folder


def metrics_of(found: Comparison, name: str) -> dict[str, Metric]:
    return next(dict(one.metrics) for one in found.part.contenders if one.name.endswith(name))


@pytest.mark.parametrize("name", ["exflow", "eplb", "contiguous"])
def test_on_its_own_trace_a_plan_has_the_held_out_figures_and_the_verdict_that_it_was_solved_with(
    trace: Any, home: Path, name: str
) -> None:
    found, plan = compare([home / f"{name}.json"], trace.path), load(home / f"{name}.json")
    assert plan.evaluation is not None
    assert plan.evaluation.held_out is not None
    assert metrics_of(found, f"{name}.json") == plan.evaluation.held_out.contenders[0].metrics
    assert plan.verdict is not None
    assert found.compared[0].claimed == plan.verdict.gain
    if plan.dispatch_model == "standard":
        assert found.compared[0].verdict.gain == plan.verdict.gain
    assert found.num_fitted == plan.evaluation.fit.num_samples
    assert not found.seen


def test_a_plan_fitted_to_everything_is_judged_on_that_and_it_is_said(trace: Any, tmp_path: Path) -> None:
    found = compare([planned(trace, tmp_path / "all.json", fit_fraction=1.0)], trace.path)
    assert found.seen
    assert found.part.num_samples == 130


def test_samples_that_either_plan_was_fitted_to_are_left_out(trace: Any, home: Path, tmp_path: Path) -> None:
    other = planned(trace, tmp_path / "other.json", seed=5)
    alone, both = (compare(paths, trace.path) for paths in ([other], [other, home / "exflow.json"]))
    assert alone.num_fitted < both.num_fitted < 130


@pytest.mark.parametrize("columns", [("sample",), ("sample", "step"), ("step",), ()])
@pytest.mark.parametrize("samples", [9, 200])
def test_any_trace_of_the_model_will_do_larger_or_smaller_with_or_without_steps_and_samples(
    make_trace: Any, home: Path, columns: tuple[str, ...], samples: int
) -> None:
    other = make_trace(samples=samples, columns=columns, seed=3)
    found = compare([home / "exflow.json", home / "eplb.json"], other.path)
    assert found.part.num_tokens == samples * 10
    assert found.num_fitted == 0
    assert [one.plan.strategies for one in found.compared] == [("exflow",), ("eplb",)]


def test_gains_are_differences_against_each_plans_own_baseline_and_against_the_first(
    make_trace: Any, home: Path
) -> None:
    other = make_trace(samples=150, seed=4)
    found = compare([home / "exflow.json", home / "eplb.json"], other.path)
    first, second = found.compared
    ours, theirs, own = (metrics_of(found, name) for name in ("exflow.json", "eplb.json", "contiguous in 12 slots"))
    base = next(one.metrics for one in found.part.contenders if one.label == "contiguous/coherent")
    assert first.verdict.gain.value == base["device_copies"].value - ours["device_copies"].value
    assert first.verdict.against == "contiguous/coherent"
    assert second.verdict.metric == "balance"
    assert second.verdict.gain.value == own["balance"].value - theirs["balance"].value
    assert first.against_first is None
    versus = second.against_first
    assert versus is not None
    assert versus.metric == "device_copies"
    assert versus.gain.value == ours["device_copies"].value - theirs["device_copies"].value
    assert versus.gain.low is not None
    assert versus.gain.low < versus.gain.value < versus.gain.high  # type: ignore[operator]


def rewritten(trace: Any, path: Path, change: Callable[[Array, int], Array]) -> Path:
    """A trace whose layers choose what `change` makes of the first one's experts."""
    meta = TraceMeta(form="tokens", model=trace.model, recorder="test")
    with TraceWriter(path, meta) as writer:
        for batch in trace.batches():
            first = batch.ids[:, 0].copy()
            for layer in range(batch.ids.shape[1]):
                batch.ids[:, layer] = change(first, layer)
            writer.append(batch)
    return path


def test_a_plan_does_not_pay_where_experts_no_longer_follow_each_other(trace: Any, home: Path, tmp_path: Path) -> None:
    experts, rng = trace.model.num_experts, np.random.default_rng(0)
    coupled = rewritten(trace, tmp_path / "coupled", lambda first, layer: (first + 3 * layer) % experts)
    mixed = rewritten(trace, tmp_path / "mixed", lambda first, _: first[rng.permutation(len(first))])
    plan = planned(open_trace(coupled), tmp_path / "plan.json", objective="copies")
    assert compare([plan], coupled).failing == []
    found = compare([plan, home / "contiguous.json"], mixed)
    assert found.failing == [str(plan), str(home / "contiguous.json")]
    assert found.compared[0].verdict.against == "contiguous/coherent"  # coherence alone saves copies still


def test_one_sample_shows_nothing(make_trace: Any, home: Path) -> None:
    one = make_trace(samples=1, columns=("sample",), seed=7)
    found = compare([home / "exflow.json"], one.path).compared[0].verdict
    assert (found.value, found.gain.low, found.gain.high) == ("none", None, None)


def test_a_pipeline_has_the_seconds_it_was_solved_with_and_is_held_against_one_chunk(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    trace, profile = make_trace(samples=130, tokens=12), make_profile("2x2")
    planned(trace, tmp_path / "base.json", profile=profile, strategy="eplb")
    piped = planned(trace, tmp_path / "piped.json", profile=profile, strategy="pipemoe", on=tmp_path / "base.json")
    found, plan = compare([piped, tmp_path / "base.json"], trace.path, profile=profile), load(piped)
    assert plan.evaluation is not None
    assert plan.evaluation.held_out is not None
    ours = metrics_of(found, "piped.json")
    for name, metric in plan.evaluation.held_out.contenders[0].metrics.items():
        assert ours[name].value == pytest.approx(metric.value, rel=1e-12), name
    assert plan.verdict is not None
    assert found.compared[0].verdict.metric == "step_s"
    assert found.compared[0].verdict.gain.value == pytest.approx(plan.verdict.gain.value, rel=1e-9)
    versus = found.compared[1].against_first
    assert versus is not None
    assert versus.metric == "step_s"
    assert versus.gain.value == pytest.approx(-plan.verdict.gain.value, rel=1e-9)
    with pytest.raises(UsageError, match="--profile"):
        compare([piped], trace.path)
    coherent = planned(trace, tmp_path / "coherent.json")
    with pytest.raises(UsageError, match=r"coherent.json is for coherent dispatch"):
        compare([piped, coherent], trace.path, profile=profile)


def test_a_fixed_capacity_drops_on_other_text_what_finds_no_room_there(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    trace, profile = make_trace(samples=130, tokens=12), make_profile("2x2")
    loose, tight = (
        planned(trace, tmp_path / f"{factor}.json", profile=profile, strategy="pipemoe", capacity_factor=factor)
        for factor in (4.0, 1.0)
    )
    found, plan = compare([tight, loose], trace.path, profile=profile), load(tight)
    assert plan.evaluation is not None
    assert plan.evaluation.held_out is not None
    assert dict(metrics_of(found, "1.0.json")) == pytest.approx(dict(plan.evaluation.held_out.contenders[0].metrics))
    new = make_trace(samples=150, tokens=9, seed=4)
    there = compare([tight, loose], new.path, profile=profile)
    shares = [metrics_of(there, f"{name}.json")["dropped_share"].value for name in ("1.0", "4.0")]
    assert shares[0] > shares[1] >= 0
    assert shares[0] != metrics_of(found, "1.0.json")["dropped_share"].value
    small = planned(trace, tmp_path / "small.json", profile=profile, strategy="pipemoe", capacity_factor=0.2)
    with pytest.raises(UsageError, match=r"small.json: its fixed capacity holds no row"):
        compare([small], make_trace(samples=90, tokens=1).path, profile=profile, samples_per_step=4)


def test_a_pipeline_of_one_chunk_has_its_own_baseline_s_seconds_whatever_stands_beside_it(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    trace, profile = make_trace(samples=130, tokens=12), make_profile("2x2")
    piped = planned(trace, tmp_path / "piped.json", profile=profile, strategy="pipemoe")
    fixed = planned(trace, tmp_path / "fixed.json", profile=profile, strategy="pipemoe", capacity_factor=2.0)
    alone, both = compare([piped], trace.path, profile=profile), compare([piped, fixed], trace.path, profile=profile)
    for name in ("piped.json", "piped.json at degree 1"):
        assert metrics_of(alone, name) == metrics_of(both, name)
    assert alone.compared[0].verdict == both.compared[0].verdict


def test_passes_that_cut_each_other_unevenly_are_refused_by_the_plan_s_name(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    trace, profile = training(make_trace(samples=60, tokens=12), tmp_path / "train"), make_profile("2x2")
    plan = load(planned(trace, tmp_path / "piped.json", profile=profile, strategy="pipemoe"))
    degrees = {"forward": [2] * 3, "backward": [3] * 3}
    save(edited(plan, "decisions/pipeline", degrees, hashed=True), tmp_path / "made.json")
    with pytest.raises(InputError, match=r"made\.json: MoE layer 0 in 2 chunks forward and 3 backward"):
        compare([tmp_path / "made.json"], trace.path, profile=profile)


def test_standard_plans_on_several_nodes_are_judged_by_copies_to_nodes(trace: Any, tmp_path: Path) -> None:
    path = planned(trace, tmp_path / "standard.json", dispatch_model="standard")
    found, plan = compare([path], trace.path), load(path)
    assert plan.verdict is not None
    assert (plan.verdict.metric, found.compared[0].verdict.metric) == ("node_copies", "node_copies")
    assert found.compared[0].verdict.gain == plan.verdict.gain


def test_a_plan_without_evaluation_or_by_a_strategy_that_nobody_knows_is_judged_by_copies(
    trace: Any, home: Path, tmp_path: Path
) -> None:
    value = json.loads((home / "exflow.json").read_text())
    bare = {**value, "evaluation": None, "verdict": None, "options": {}, "outcome": {}, "strategies": ["theirs"]}
    (tmp_path / "bare.json").write_text(json.dumps(bare))
    (tmp_path / "none.json").write_text(json.dumps({**bare, "strategies": []}))
    found = compare([tmp_path / "bare.json", tmp_path / "none.json"], trace.path)
    assert [one.claimed for one in found.compared] == [None, None]
    assert [one.verdict.metric for one in found.compared] == ["node_copies"] * 2
    versus = found.compared[1].against_first
    assert versus is not None
    assert versus.gain == Metric(value=0, low=0, high=0)


def test_fifty_plans_stand_in_one_table_in_their_order(trace: Any, home: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.json" for number in range(50)]
    for path in paths:
        path.write_bytes((home / "exflow.json").read_bytes())
    found = compare(paths, trace.path)
    assert [one.name for one in found.part.contenders] == [*map(str, paths), "contiguous", "contiguous"]
    assert len({one.verdict.gain.value for one in found.compared}) == 1


def test_a_plan_named_as_a_baseline_is_refused(trace: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    Path("contiguous").write_bytes((home / "contiguous.json").read_bytes())
    with pytest.raises(UsageError, match="rename its file"):
        compare(["contiguous"], trace.path)


def test_what_cannot_be_compared_is_refused_by_name_with_the_reason(
    make_trace: Any, trace: Any, home: Path, tmp_path: Path
) -> None:
    small = planned(trace, tmp_path / "small.json", cluster=Cluster.parse("1x2"))
    with pytest.raises(UsageError, match=r"small.json is for 1x2, .*exflow.json for 2x2"):
        compare([home / "exflow.json", small], trace.path)
    for changes, words in (({"layers": 4}, "layer_ids"), ({"experts": 16}, "num_experts"), ({"top_k": 1}, "top_k")):
        with pytest.raises(MismatchError, match=words):
            compare([home / "exflow.json"], make_trace(samples=4, **changes).path)
    with pytest.raises(UsageError, match="each once"):
        compare([home / "exflow.json"] * 2, trace.path)
    with pytest.raises(UsageError, match="each once"):
        compare([], trace.path)


def test_a_forged_step_size_is_one_clear_line(trace: Any, home: Path, tmp_path: Path) -> None:
    value = json.loads((home / "exflow.json").read_text())
    value["options"]["evaluation"]["samples_per_step"] = "many"
    (tmp_path / "forged.json").write_text(json.dumps(value))
    with pytest.raises(InputError, match="samples_per_step 'many'"):
        compare([tmp_path / "forged.json"], trace.path)


def test_its_json_form_is_finite_and_holds_every_plans_verdict(trace: Any, home: Path) -> None:
    compared = compare([home / "eplb.json", home / "contiguous.json"], trace.path)
    found = as_dict(compared)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    verdicts = [one["verdict"]["value"] for one in found["plans"]]
    assert verdicts == [one.verdict.value for one in compared.compared]
    assert verdicts[1] == "none"
    assert found["no_longer_pay"] == compared.failing
