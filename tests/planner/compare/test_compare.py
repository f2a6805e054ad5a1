"""Plans side by side: what each is judged on, what each is held against, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.errors import InputError, MismatchError, UsageError
from moeplan.planner.compare import Comparison, compare
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.profile import load as load_profile
from moeplan.runtime.plan import Metric, load, save
from moeplan.traces.reader import Trace
from tests.planner.makers import edited, stored_tokens, training

Array = NDArray[Any]
Shelf = Callable[[str], Path]
Planned = Callable[..., Path]


def metrics_of(found: Comparison, name: str) -> dict[str, Metric]:
    return next(dict(one.metrics) for one in found.part.contenders if one.name.endswith(name))


def labelled(found: Comparison, label: str) -> dict[str, Metric]:
    return next(dict(one.metrics) for one in found.part.contenders if one.label == label)


def changed(path: Path, target: Path, **parts: Any) -> Path:
    """A plan with some of its JSON otherwise."""
    target.write_text(json.dumps({**json.loads(path.read_text()), **parts}))
    return target


def test_samples_that_either_plan_was_fitted_to_are_left_out(trace: Trace, shelf: Shelf, planned: Planned) -> None:
    other = planned(trace, strategy="contiguous", seed=5)
    alone, both = (compare(paths, trace.path) for paths in ([other], [other, shelf("coherent")]))
    assert alone.num_fitted < both.num_fitted < 130


@pytest.mark.parametrize("columns", [("sample",), ("sample", "step"), ("step",), ()])
@pytest.mark.parametrize("samples", [9, 200])
def test_any_trace_of_the_model_will_do_larger_or_smaller_with_or_without_steps_and_samples(
    make_trace: Any, shelf: Shelf, columns: tuple[str, ...], samples: int
) -> None:
    other = make_trace(samples=samples, columns=columns, seed=3)
    found = compare([shelf("coherent"), shelf("replicated")], other.path)
    assert found.part.num_tokens == samples * 10
    assert found.num_fitted == 0
    assert [one.plan.strategies for one in found.compared] == [("exflow",), ("eplb",)]


def rewritten(trace: Trace, path: Path, change: Callable[[Array], Array]) -> Trace:
    """A trace of tokens whose second expert is what `change` makes of the first."""
    batches = []
    for batch in trace.batches():
        first = batch.ids[:, :, 0]
        batches.append(replace(batch, ids=np.stack([first, change(first)], axis=2).astype(np.uint16)))
    return stored_tokens(path, trace.model, *batches)


def test_a_plan_does_not_pay_where_experts_no_longer_serve_the_same_tokens(
    trace: Trace, shelf: Shelf, planned: Planned, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    coupled = rewritten(trace, tmp_path / "coupled", lambda first: (first + 4) % 8)
    mixed = rewritten(trace, tmp_path / "mixed", lambda first: (first + rng.integers(1, 8, first.shape)) % 8)
    plan = planned(coupled, dispatch_model="standard")
    assert compare([plan], coupled.path).failing == []
    assert compare([plan, shelf("contiguous")], mixed.path).failing == [str(plan), str(shelf("contiguous"))]


def test_one_sample_shows_nothing(make_trace: Any, shelf: Shelf) -> None:
    one = make_trace(samples=1, columns=("sample",), seed=7)
    found = compare([shelf("coherent")], one.path).compared[0].verdict
    assert (found.value, found.gain.low, found.gain.high) == ("none", None, None)


def test_a_pipeline_is_held_against_today_and_stands_beside_one_chunk_and_needs_a_profile(
    trace: Trace, profile: Path, shelf: Shelf
) -> None:
    piped, even = shelf("piped_s"), shelf("even_s")
    found = compare([piped, even], trace.path, profile=profile)
    first, second = found.compared
    assert first.verdict.against == "contiguous/standard"
    assert metrics_of(found, "piped_s.json at degree 1") == metrics_of(found, "even_s.json")
    assert second.against_first is not None
    assert second.against_first.metric == "step_s"
    step_s = [metrics_of(found, f"{name}.json")["step_s"].value for name in ("piped_s", "even_s")]
    assert second.against_first.gain.value == pytest.approx(step_s[0] - step_s[1])
    with pytest.raises(UsageError, match="--profile"):
        compare([piped], trace.path)


def test_where_steps_cannot_be_held_against_a_first_pipeline_copies_are(
    trace: Trace, make_profile: Callable[..., Path], shelf: Shelf
) -> None:
    untimed = make_profile("2x2", cases=("all_to_all", "all_gather", "expert_ffn"))  # attention
    versus = compare([shelf("piped_s"), shelf("coherent")], trace.path, profile=untimed).compared[1].against_first
    assert versus is not None
    assert versus.metric == "device_copies"


def test_samples_that_a_placement_was_fitted_to_are_left_out_beside_a_policy(trace: Trace, shelf: Shelf) -> None:
    alone, both = (compare(paths, trace.path) for paths in ([shelf("moving")], [shelf("moving"), shelf("even")]))
    assert (both.num_fitted, both.seen) == (alone.num_fitted, False)


def test_links_are_the_plans_own_beside_the_profile_that_it_was_made_with_and_those_of_another_one(
    trace: Trace, make_profile: Callable[..., Path], planned: Planned, tmp_path: Path
) -> None:
    profile, cluster = make_profile("2x2"), Cluster.parse("2x2", ["intra=100:3", "inter=10:12"])
    path = planned(trace, "linked.json", strategy="netmoe", profile=profile, cluster=cluster)
    here = compare([path], trace.path, profile=profile)
    assert here.cluster.links == cluster.links
    assert here.compared[0].claimed == here.compared[0].verdict.gain
    again = tmp_path / "again.json"
    again.write_text(profile.read_text() + "\n")
    assert compare([path], trace.path, profile=again).cluster.links == load_profile(profile).cluster.links


def test_a_plan_for_one_node_takes_no_links_between_nodes_from_a_profile(
    trace: Trace, make_profile: Callable[..., Path], planned: Planned
) -> None:
    node = planned(trace, "node.json", strategy="eplb", cluster=Cluster.parse("1x4"))
    assert {*compare([node], trace.path, profile=make_profile("2x4")).cluster.links} == {"intra"}


def test_a_fixed_capacity_drops_on_other_text_what_finds_no_room_there(
    make_trace: Any, trace: Trace, new: Trace, profile: Path, shelf: Shelf, planned: Planned
) -> None:
    paths = [shelf("capped_s"), shelf("roomy_s")]
    here, there = (compare(paths, one.path, profile=profile) for one in (trace, new))
    shares = [metrics_of(there, f"{name}_s.json")["dropped_share"].value for name in ("capped", "roomy")]
    assert shares[0] > shares[1] >= 0
    assert shares[0] != metrics_of(here, "capped_s.json")["dropped_share"].value
    small = planned(trace, "small.json", profile=profile, strategy="pipemoe", capacity_factor=0.2)
    with pytest.raises(UsageError, match=r"small.json: its fixed capacity holds no row"):
        compare([small], make_trace(samples=90, tokens=1).path, profile=profile, samples_per_step=4)


def test_passes_that_cut_each_other_unevenly_or_differ_are_refused_by_the_plan_s_name(
    trace: Trace, profile: Path, shelf: Shelf, planned: Planned, tmp_path: Path
) -> None:
    train = training(trace, tmp_path / "train")
    trained = planned(train, "trained.json", profile=profile, strategy="pipemoe")
    degrees = {"forward": [2] * 3, "backward": [3] * 3}
    save(edited(load(trained), "decisions/pipeline", degrees), tmp_path / "made.json")
    with pytest.raises(InputError, match=r"made\.json: MoE layer 0 in 2 chunks forward and 3 backward"):
        compare([tmp_path / "made.json"], train.path, profile=profile)
    with pytest.raises(UsageError, match=r"piped_s.json, .*trained.json differ in their passes or duplex"):
        compare([shelf("piped_s"), trained], trace.path, profile=profile)


def test_a_plan_without_evaluation_or_by_a_strategy_that_nobody_knows_is_judged_by_copies(
    trace: Trace, shelf: Shelf, tmp_path: Path
) -> None:
    bare: dict[str, Any] = {"evaluation": None, "verdict": None, "options": {}, "outcome": {}}
    paths = [
        changed(shelf("standard"), tmp_path / f"{number}.json", **bare, strategies=names)
        for number, names in enumerate((["theirs"], []))
    ]
    found = compare(paths, trace.path)
    assert [one.claimed for one in found.compared] == [None, None]
    assert [one.verdict.metric for one in found.compared] == ["node_copies"] * 2
    versus = found.compared[1].against_first
    assert versus is not None
    assert versus.gain == Metric(value=0, low=0, high=0)


def test_a_plan_named_as_a_baseline_is_refused(
    trace: Trace, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("contiguous").write_bytes(shelf("replicated").read_bytes())
    with pytest.raises(UsageError, match="rename"):
        compare(["contiguous"], trace.path)


def test_what_cannot_be_compared_is_refused_by_name_with_the_reason(
    make_trace: Any, trace: Trace, shelf: Shelf, planned: Planned
) -> None:
    coherent, small = shelf("coherent"), planned(trace, "small.json", cluster=Cluster.parse("1x2"))
    with pytest.raises(UsageError, match=r"small.json is for 1x2, .*coherent.json for 2x2"):
        compare([coherent, small], trace.path)
    for changes, words in (({"layers": 4}, "layer_ids"), ({"experts": 16}, "num_experts"), ({"top_k": 1}, "top_k")):
        with pytest.raises(MismatchError, match=words):
            compare([coherent], make_trace(samples=4, **changes).path)
    for paths in ([coherent] * 2, []):
        with pytest.raises(UsageError, match="each once"):
            compare(paths, trace.path)


def test_a_forged_step_size_is_one_clear_line(trace: Trace, shelf: Shelf, tmp_path: Path) -> None:
    forged = edited(load(shelf("coherent")), "options.evaluation.samples_per_step", "many")
    save(forged, tmp_path / "forged.json")
    with pytest.raises(InputError, match="samples_per_step 'many'"):
        compare([tmp_path / "forged.json"], trace.path)


def test_a_predictor_that_is_missing_or_another_is_one_clear_error(trace: Trace, shelf: Shelf, tmp_path: Path) -> None:
    policy = load(shelf("moving")).decisions.sample_policy
    assert policy is not None
    assert policy.predictor is not None
    (tmp_path / "policy.json").write_bytes(shelf("moving").read_bytes())
    with pytest.raises(InputError, match="the plan's predictor"):
        compare([tmp_path / "policy.json"], trace.path)
    (tmp_path / policy.predictor.file).write_bytes(b"another")
    with pytest.raises(InputError, match=r"policy.json: .*not the plan's"):
        compare([tmp_path / "policy.json"], trace.path)


def test_samples_in_several_steps_are_moved_and_judged_beside_placements_step_by_step(
    trace: Trace, shelf: Shelf, tmp_path: Path
) -> None:
    steps = (replace(batch, step=(batch.position % 4).astype(np.int32)) for batch in trace.batches())
    again = stored_tokens(tmp_path / "again", trace.model, *steps)
    alone, both = compare([shelf("even")], again.path), compare([shelf("moving"), shelf("even")], again.path)
    assert both.part.num_steps == alone.part.num_steps == 4
    ours, theirs = (labelled(one, f"{shelf('even')}/standard") for one in (both, alone))
    assert ours["balance"].value == pytest.approx(theirs["balance"].value, rel=1e-12)
    assert ours["device_copies"].value == pytest.approx(theirs["device_copies"].value, rel=0.01)  # other homes


def test_a_policy_needs_samples(make_trace: Any, shelf: Shelf) -> None:
    with pytest.raises(UsageError, match="samples were not recorded"):
        compare([shelf("moving")], make_trace(samples=40, columns=("step",)).path)
