"""Plans side by side: what each is judged on, as when it was solved and alone; what each is held against; refusals."""

import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from moeplan.errors import InputError, MismatchError, UsageError
from moeplan.planner.compare import Comparison, compare
from moeplan.planner.evaluate.step_size import StepSize
from moeplan.planner.report.compare import as_dict, compare_report
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.profile import load as load_profile
from moeplan.runtime.plan import Metric, load, save
from tests.builders import known
from tests.planner.makers import edited, in_several_steps, planned, rewritten, screen, training

Shelf = Callable[[str], Path]
STILL = ("coherent", "coherent_s", "standard", "replicated", "contiguous", "even_s", "piped_s", "capped_s", "dead")
MOVING = ("moving", "moving_on", "moving_on_s", "moving_piped_s")


@pytest.fixture(scope="module")
def trace(make_trace: Any) -> Any:
    """A trace of four steps a part on 2x2."""
    return make_trace(samples=130, tokens=12)


@pytest.fixture(scope="module")
def new(make_trace: Any) -> Any:
    """Another trace of the model, of whole steps alone."""
    return make_trace(samples=96, tokens=10, seed=4)


@pytest.fixture(scope="module")
def profile(make_profile: Any) -> Any:
    """What times 2x2."""
    return make_profile("2x2")


@pytest.fixture(scope="module")
def shelf(trace: Any, profile: Path, tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """The plan of a name, made when it is first asked for; timed ones have `_s` in it."""
    kinds: dict[str, dict[str, Any]] = {
        "coherent": {"objective": "copies"},
        "coherent_s": {"objective": "copies"},
        "standard": {"dispatch_model": "standard"},
        "replicated": {"strategy": "eplb", "redundant": 4},
        "even": {"strategy": "eplb"},
        "even_s": {"strategy": "eplb"},
        "dead": {"strategy": "eplb", "dead": (3,), "redundant": 4},
        "contiguous": {"strategy": "contiguous"},
        "piped_s": {"strategy": "pipemoe", "on": "even_s"},
        "capped_s": {"strategy": "pipemoe", "capacity_factor": 1.0},
        "roomy_s": {"strategy": "pipemoe", "capacity_factor": 4.0},
        "moving": {"strategy": "netmoe"},
        "moving_on": {"strategy": "netmoe", "on": "even"},
        "moving_on_s": {"strategy": "netmoe", "on": "even_s"},
        "moving_piped_s": {"strategy": "netmoe", "on": "piped_s"},
    }

    @cache
    def plan(name: str) -> Path:
        path, settings = tmp_path_factory.mktemp("plans") / f"{name}.json", dict(kinds[name])
        if "on" in settings:
            settings["on"] = plan(settings["on"])
        planned(trace, cluster=Cluster(2, 2), profile=profile if "_s" in name else None, to=path, **settings)
        return path

    return plan


def metrics_of(comparison: Comparison) -> dict[str, dict[str, Metric]]:
    """Label to metrics, paths as names without folders."""
    contenders = comparison.part.contenders
    return {f"{Path(one.name).name}/{one.dispatch_model}": dict(one.metrics) for one in contenders}


def close(ours: Metric, theirs: Metric) -> bool:
    ends = [[one.value, one.low, one.high] for one in (ours, theirs)]
    return ends[0] == [None if one is None else pytest.approx(one, rel=1e-9, abs=1e-15) for one in ends[1]]


@pytest.mark.parametrize("name", [*STILL, *MOVING])
def test_on_its_own_trace_a_plan_has_the_figures_of_solve(trace: Any, profile: Any, shelf: Shelf, name: str) -> None:
    plan: Any = load(shelf(name))
    comparison = compare([shelf(name)], trace.path, profile=profile if name.endswith("_s") else None)
    ours, theirs, evaluation = comparison.compared[0].verdict, plan.verdict, plan.evaluation
    today = "contiguous without 3/standard" if name == "dead" else "contiguous/standard"
    assert ours.against == theirs.against == today
    assert (ours.value, ours.metric, ours.at_least) == (theirs.value, theirs.metric, theirs.at_least)
    assert close(ours.gain, theirs.gain)
    assert comparison.compared[0].claimed == theirs.gain
    solved = {one.label: one.metrics for one in evaluation.held_out.contenders}
    compared = metrics_of(comparison)
    assert today in compared
    solved[f"{name}.json/{plan.dispatch_model}"] = solved[f"plan/{plan.dispatch_model}"]
    assert f"{name}.json/{plan.dispatch_model}" in compared
    for label in compared.keys() & solved.keys():
        assert compared[label].keys() == solved[label].keys()
        assert all(close(metric, solved[label][key]) for key, metric in compared[label].items())
    assert (comparison.num_fitted, comparison.seen) == (evaluation.fit.num_samples, False)


def test_a_profile_is_read_once(trace: Any, make_profile: Any, shelf: Shelf) -> None:
    other = make_profile("2x4")  # whose cluster is asked for, too
    with mock.patch("moeplan.planner.compare.load_profile", side_effect=load_profile) as read:
        assert compare([shelf("coherent")], trace.path, profile=other).profiled is not None
    assert read.call_count == 1


def test_any_mix_of_plans_has_the_figures_that_each_has_alone(new: Any, profile: Path, shelf: Shelf) -> None:
    names = ("coherent", "piped_s", "moving", "moving_on_s", "moving_piped_s", "replicated", "capped_s", "roomy_s")
    paths = [shelf(name) for name in names]
    together = compare(paths, new.path, profile=profile)
    assert [Path(one.path) for one in together.compared] == paths
    assert {one.verdict.against for one in together.compared} == {"contiguous/standard"}
    assert all("exchange_s" in metrics for metrics in metrics_of(together).values())
    for path, joint in zip(paths, together.compared, strict=True):
        alone = compare([path], new.path, profile=profile)
        for label, metrics in metrics_of(alone).items():
            beside = metrics_of(together)[label]
            shared = metrics.keys() & beside.keys()
            assert {"device_copies", "balance", "step_s", "exchange_s"} <= shared
            for name in shared:
                assert beside[name].value == pytest.approx(metrics[name].value, rel=1e-9), (label, name)
        assert joint.verdict.metric == alone.compared[0].verdict.metric
        assert joint.verdict.gain.value == pytest.approx(alone.compared[0].verdict.gain.value, rel=1e-6, abs=1e-12)


def test_a_policy_on_a_pipeline_is_judged_with_its_chunks(trace: Any, profile: Path, shelf: Shelf) -> None:
    metrics = metrics_of(compare([shelf("moving_piped_s"), shelf("piped_s")], trace.path, profile=profile))
    assert "moving_piped_s.json at degree 1/migrating" in metrics
    assert metrics["moving_piped_s.json, samples staying/standard"] == metrics["piped_s.json/standard"]
    assert {"moe_s", "dispatch_s", "exchange_s", "step_s"} <= metrics["moving_piped_s.json/migrating"].keys()


def test_samples_that_either_plan_was_fitted_to_are_left_out(trace: Any, shelf: Shelf, tmp_path: Path) -> None:
    planned(trace, "contiguous", seed=5, to=tmp_path / "other.json")
    alone, both = (compare([tmp_path / "other.json", *beside], trace.path) for beside in ([], [shelf("coherent")]))
    assert alone.num_fitted < both.num_fitted < 130
    alone, both = (compare([shelf("moving"), *beside], trace.path) for beside in ([], [shelf("even")]))
    assert (both.num_fitted, both.seen) == (alone.num_fitted, False)


@pytest.mark.parametrize(("columns", "samples"), [(("sample", "step"), 9), (("step",), 200), ((), 9)])
def test_any_trace_of_the_model_will_do(make_trace: Any, shelf: Shelf, columns: Any, samples: int) -> None:
    other = make_trace(samples=samples, columns=columns, seed=3)
    comparison = compare([shelf("coherent"), shelf("replicated")], other.path)
    assert (comparison.part.num_tokens, comparison.num_fitted) == (samples * 10, 0)


def test_a_plan_does_not_pay_where_experts_serve_other_tokens(trace: Any, shelf: Shelf, tmp_path: Path) -> None:
    rng, plan = np.random.default_rng(0), tmp_path / "plan.json"

    def onward(batch: Any, by: Any) -> Any:
        """Second experts so much further than the first ones."""
        first = batch.ids[:, :, 0]
        return {"ids": np.stack([first, (first + by) % 8], axis=2).astype(np.uint16)}

    coupled = rewritten(trace, tmp_path / "coupled", lambda batch: onward(batch, 4))
    mixed = rewritten(trace, tmp_path / "mixed", lambda batch: onward(batch, rng.integers(1, 8, batch.ids.shape[:2])))
    planned(coupled, dispatch_model="standard", to=plan)
    assert compare([plan], coupled.path).failing == []
    assert compare([plan, shelf("contiguous")], mixed.path).failing == [str(plan), str(shelf("contiguous"))]


def test_a_pipeline_is_held_against_today_and_stands_beside_one_chunk(
    trace: Any, make_profile: Any, profile: Path, shelf: Shelf
) -> None:
    piped, even = shelf("piped_s"), shelf("even_s")
    comparison = compare([piped, even], trace.path, profile=profile)
    assert f" of {piped}, standard; 95 %" in " ".join(screen(compare_report, comparison).split())
    metrics, (first, second) = metrics_of(comparison), comparison.compared
    assert first.verdict.against == "contiguous/standard"
    assert metrics["piped_s.json at degree 1/standard"] == metrics["even_s.json/standard"]
    step_s = [metrics[f"{name}.json/standard"]["step_s"].value for name in ("piped_s", "even_s")]
    assert known(second.against_first).metric == "step_s"
    assert known(second.against_first).gain.value == pytest.approx(step_s[0] - step_s[1])
    with pytest.raises(UsageError, match="--profile"):
        compare([piped], trace.path)
    unattended = make_profile("2x2", cases=("all_to_all", "all_gather", "expert_ffn"))
    versus = compare([piped, shelf("coherent")], trace.path, profile=unattended).compared[1].against_first
    assert known(versus).metric == "step_s"


def test_links_are_the_plans_own_beside_its_profile_alone(trace: Any, make_profile: Any, tmp_path: Path) -> None:
    profile, cluster = make_profile("2x2"), Cluster.parse("2x2", ["intra=100:3", "inter=10:12"])
    linked, again, node = (tmp_path / name for name in ("linked.json", "again.json", "node.json"))
    planned(trace, "netmoe", cluster, profile=profile, to=linked)
    here = compare([linked], trace.path, profile=profile)
    assert here.cluster.links == cluster.links
    assert here.compared[0].claimed == here.compared[0].verdict.gain
    again.write_text(profile.read_text() + "\n")
    assert compare([linked], trace.path, profile=again).cluster.links == load_profile(profile).cluster.links
    planned(trace, "eplb", "1x4", to=node)  # takes no links between nodes
    assert {*compare([node], trace.path, profile=make_profile("2x4")).cluster.links} == {"intra"}


def test_a_profile_of_another_cluster_is_named_unless_the_plan_was_solved_with_it(
    trace: Any, make_profile: Any, profile: Path, tmp_path: Path
) -> None:
    larger, words = make_profile("2x4"), "the profile is of 2x4, not 2x2: its curves and links are taken as they are"
    for source, told in ((profile, True), (larger, False)):
        planned(trace, "eplb", "2x2", profile=source, to=tmp_path / "plan.json")
        comparison = compare([tmp_path / "plan.json"], trace.path, profile=larger)
        assert (words in screen(compare_report, comparison)) == told
        assert as_dict(comparison)["profile_cluster"] == ("2x4" if told else None)
        assert words not in screen(compare_report, compare([tmp_path / "plan.json"], trace.path, profile=profile))


def test_a_fixed_capacity_drops_on_other_text_what_finds_no_room_there(
    make_trace: Any, trace: Any, new: Any, profile: Path, shelf: Shelf, tmp_path: Path
) -> None:
    metrics = metrics_of(compare([shelf("capped_s"), shelf("roomy_s")], new.path, profile=profile))
    capped, roomy = (metrics[f"{name}_s.json/standard"]["dropped_share"].value for name in ("capped", "roomy"))
    assert capped > roomy >= 0
    planned(trace, "pipemoe", profile=profile, capacity_factor=0.2, to=tmp_path / "small.json")
    with pytest.raises(UsageError, match=r"small.json: its fixed capacity holds no row"):
        compare(
            [tmp_path / "small.json"],
            make_trace(samples=90, tokens=1).path,
            profile=profile,
            size=StepSize("samples", 4),
        )


def test_passes_that_do_not_fit_are_refused_by_name(trace: Any, profile: Path, shelf: Shelf, tmp_path: Path) -> None:
    train = training(trace, tmp_path / "train")
    trained = planned(train, "pipemoe", profile=profile, to=tmp_path / "trained.json")
    degrees = {"forward": [2] * 3, "backward": [3] * 3}
    save(edited(trained, "decisions/pipeline", degrees), tmp_path / "made.json")
    with pytest.raises(InputError, match=r"made\.json: MoE layer 0 in 2 chunks forward and 3 backward"):
        compare([tmp_path / "made.json"], train.path, profile=profile)
    with pytest.raises(UsageError, match=r"piped_s.json, .*trained.json differ in their passes or duplex"):
        compare([shelf("piped_s"), tmp_path / "trained.json"], trace.path, profile=profile)
    for pair in itertools.permutations([shelf("standard"), tmp_path / "trained.json"]):  # that serves, this trains
        with pytest.raises(UsageError, match="differ in their passes"):
            compare(pair, trace.path, profile=profile)


def test_a_plan_by_nobody_or_a_strategy_unknown_is_judged_by_copies(trace: Any, shelf: Shelf, tmp_path: Path) -> None:
    value, paths = json.loads(shelf("standard").read_text()), [tmp_path / "theirs.json", tmp_path / "bare.json"]
    bare: dict[str, Any] = {"evaluation": None, "verdict": None, "options": {}, "outcome": {}}
    for path, names in zip(paths, (["theirs"], []), strict=True):
        path.write_text(json.dumps(value | bare | {"strategies": names}))
    comparison = compare(paths, trace.path).compared
    assert [one.claimed for one in comparison] == [None, None]
    assert [one.verdict.metric for one in comparison] == ["node_copies"] * 2
    assert known(comparison[1].against_first).gain == Metric(value=0, low=0, high=0)


def test_what_cannot_be_compared_is_refused_by_name_with_the_reason(
    make_trace: Any, trace: Any, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coherent, small, forged = shelf("coherent"), tmp_path / "small.json", tmp_path / "forged.json"
    planned(trace, cluster="1x2", to=small)
    save(edited(load(coherent), "options.evaluation.samples_per_step", 10**20), forged)
    stepless = tmp_path / "stepless.json"
    save(edited(load(shelf("moving")), "options.evaluation.unit", "step"), stepless)
    (tmp_path / "contiguous").write_bytes(shelf("replicated").read_bytes())
    monkeypatch.chdir(tmp_path)
    for paths, error, words in (
        ([coherent, small], UsageError, r"small.json is for 1x2, .*coherent.json for 2x2"),
        ([coherent] * 2, UsageError, "each once"),
        ([], UsageError, "each once"),
        ([forged], InputError, "options.evaluation: 1 values missing"),
        ([stepless], InputError, "split by step, which its trace does not record"),
        (["contiguous"], UsageError, "rename"),
    ):
        with pytest.raises(error, match=words):
            compare(paths, trace.path)
    for changes, words in (
        ({"layers": 4}, r"layer_ids 0-2 \(3 layers\), .* has layer_ids 0-3 \(4 layers\);"),
        ({"experts": 16}, "num_experts"),
        ({"top_k": 1}, "top_k"),
    ):
        with pytest.raises(MismatchError, match=words):
            compare([coherent], make_trace(samples=4, **changes).path)
    with pytest.raises(UsageError, match="samples were not recorded"):
        compare([shelf("moving")], make_trace(samples=40, columns=("step",)).path)


def test_a_predictor_that_is_missing_or_another_is_one_clear_error(trace: Any, shelf: Shelf, tmp_path: Path) -> None:
    policy: Any = load(shelf("moving")).decisions.sample_policy
    (tmp_path / "policy.json").write_bytes(shelf("moving").read_bytes())
    with pytest.raises(InputError, match="is not there; the plan needs it beside it"):
        compare([tmp_path / "policy.json"], trace.path)
    (tmp_path / policy.predictor.file).write_bytes(b"another")
    with pytest.raises(InputError, match=r"policy.json: .*has hash"):
        compare([tmp_path / "policy.json"], trace.path)
    save(edited(load(shelf("moving")), "decisions.sample_policy.predictor", None), tmp_path / "blind.json")
    with pytest.raises(UsageError, match=r"blind.json: a policy by sum with the wrong predictor: only NetMoE"):
        compare([tmp_path / "blind.json"], trace.path)


def test_samples_in_several_steps_are_moved_and_judged_step_by_step(trace: Any, shelf: Shelf, tmp_path: Path) -> None:
    again = in_several_steps(trace, tmp_path / "again")
    alone, both = compare([shelf("even")], again.path), compare([shelf("moving"), shelf("even")], again.path)
    assert both.part.num_steps == alone.part.num_steps == 4
    ours, theirs = (metrics_of(comparison)["even.json/standard"] for comparison in (both, alone))
    assert ours["balance"].value == pytest.approx(theirs["balance"].value, rel=1e-12)
    assert ours["device_copies"].value == pytest.approx(theirs["device_copies"].value, rel=0.01)  # other homes
