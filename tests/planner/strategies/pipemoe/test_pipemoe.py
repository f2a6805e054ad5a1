"""PipeMoE as a strategy: what it decides, on what, and what it refuses to plan."""

import json
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InputError, MismatchError, UsageError
from tests.planner.makers import options, planned


def piped(trace: Any, profile: Path, *asked: Any, **settings: Any) -> Any:
    return planned(trace, "pipemoe", *asked, profile=profile, **settings)


@pytest.fixture(scope="module")
def trace(make_trace: Any) -> Any:
    return make_trace(samples=40)


@pytest.fixture(scope="module")
def profile(make_profile: Any) -> Path:
    path: Path = make_profile()
    return path


@pytest.fixture
def on(tmp_path: Path) -> Path:
    """Where a base is."""
    return tmp_path / "base.json"


def test_the_decisions_of_the_base_are_kept_and_bound_by_its_hash(trace: Any, profile: Path, on: Path) -> None:
    base = planned(trace, "eplb", profile=profile, to=on)
    plan, other = piped(trace, profile, on=on), piped(trace, profile, on=on, seed=1)
    assert plan.strategies == ("eplb", "pipemoe")
    assert plan.decisions.placement == base.decisions.placement
    assert plan.plan_sha256 != base.plan_sha256
    assert plan.inputs.base is not None
    assert plan.options["placement"] == base.options["placement"]
    assert (set(plan.outcome), set(other.outcome)) == ({"placement", "pipeline"}, {"pipeline"})
    assert options(piped(trace, profile)).placement == "contiguous"


def test_a_fixed_capacity_and_shares_are_decisions_that_the_hash_covers(make_trace: Any, make_profile: Any) -> None:
    trace, profile = make_trace(samples=32, tokens=400), make_profile("1x2", noise=0.0)
    choices: list[dict[str, Any]] = [{}, {"method": "unequal"}, {"capacity_factor": 1.25}, {"capacity_factor": 1.26}]
    plans = [piped(trace, profile, fit_fraction=1.0, max_degree=4, **choice) for choice in choices]
    decided = [plan.decisions.pipeline for plan in plans]
    assert [one.shares is not None for one in decided] == [False, True, False, False]
    assert [one.capacity_factor for one in decided] == [None, None, 1.25, 1.26]
    assert len({plan.plan_sha256 for plan in plans}) == 4
    for plan, decision in zip(plans, decided, strict=True):
        assert {one.capacity_factor for one in options(plan).baselines.values()} == {decision.capacity_factor}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"profile": None}, "no profile"),
        ({"profile": None, "links": ("intra=10:5",)}, "no profile"),
        ({"dispatch_model": "coherent"}, "--dispatch coherent"),
        ({"capacity_factor": 1e-300}, "holds none in some step"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_refused_by_name(trace: Any, profile: Path, changes: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        planned(trace, "pipemoe", "1x4", **{"profile": profile} | changes)


@pytest.mark.parametrize(
    ("cases", "ffn_size", "lacks"),
    [
        (("attention",), 96, r"none of dispatch: no all_to_all.* --link .*; and none of experts.* no expert_ffn; join"),
        (("all_to_all", "expert_ffn"), None, r"none of experts.* ffn_size is not in the trace; say it at"),
    ],
)
def test_all_that_profile_and_trace_lack_is_told_at_once(
    make_trace: Any, make_profile: Any, cases: Any, ffn_size: Any, lacks: str
) -> None:
    with pytest.raises(InputError, match=lacks):
        piped(make_trace(samples=40, ffn_size=ffn_size), make_profile(cases=cases), "1x4")


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        ({"strategy": "exflow"}, {}, "coherent dispatch"),
        ({"strategy": "pipemoe"}, {}, "pipeline, not again"),
        ({"strategy": "eplb"}, {"strategy": "eplb"}, "leave --on away"),
        ({"strategy": "pipemoe"}, {"strategy": "exflow"}, "not beside pipeline"),
        ({"strategy": "eplb"}, {"cluster": "2x2"}, "leave --cluster away"),
        ({"strategy": "eplb", "redundant": 4}, {"capacity_factor": 1.25}, "12 slots for 8 experts"),
    ],
    ids=str,
)
def test_decisions_that_do_not_go_together_are_refused_by_name(
    trace: Any, profile: Path, on: Path, base: Any, changes: Any, words: str
) -> None:
    planned(trace, profile=profile, to=on, **base)
    with pytest.raises(UsageError, match=words):
        planned(trace, profile=profile, on=on, **{"strategy": "pipemoe"} | changes)


def test_a_base_of_another_model_is_refused(make_trace: Any, trace: Any, profile: Path, on: Path) -> None:
    planned(trace, "eplb", profile=profile, to=on)
    with pytest.raises(MismatchError, match="same model"):
        piped(make_trace(samples=40, layers=4), profile, on=on)


def test_a_profile_by_which_a_layer_takes_ages_is_refused(make_trace: Any, profile: Path, tmp_path: Path) -> None:
    value = json.loads(profile.read_text())
    for series in value["series"].values():
        if series["case"] == "expert_ffn":
            series["fit"]["model"] = series["fit"]["alpha_beta"] = {"kind": "alpha_beta", "a_s": 1e-5, "b_s": 8e4}
    (tmp_path / "hostile.json").write_text(json.dumps(value))
    with pytest.raises(InputError, match=r"an MoE layer takes .* s by the profile"):
        piped(make_trace(samples=40, tokens=600), tmp_path / "hostile.json")
