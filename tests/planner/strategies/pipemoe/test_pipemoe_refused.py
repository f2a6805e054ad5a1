"""What pipemoe refuses to plan."""

import json
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InputError, MismatchError, UsageError
from moeplan.profilers.cluster import Cluster
from tests.planner.makers import make_plan, placed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"profile": None}, "no profile"),
        ({"profile": None, "cluster": Cluster.parse("1x4", ["intra=10:5"])}, "no profile"),
        ({"dispatch_model": "coherent"}, "--dispatch coherent"),
        ({"capacity_factor": 1e-300}, "holds none in some step"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_refused_by_name(
    make_trace: Any, make_profile: Any, changes: Any, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        make_plan(make_trace(), make_profile(), **changes)


def test_a_profile_that_cannot_time_the_experts_is_refused_by_name(make_trace: Any, make_profile: Any) -> None:
    with pytest.raises(InputError, match=r"none of experts.* has no expert_ffn; join it .* --merge"):
        make_plan(make_trace(samples=40), make_profile(cases=("all_to_all",)))


def test_all_that_lacks_is_told_at_once(make_trace: Any, make_profile: Any) -> None:
    lacks = r"none of dispatch: no all_to_all.* --link .*; and none of experts.* has no expert_ffn; join"
    words = rf"^\S*profile.json: pipemoe needs .*; there are {lacks}"
    with pytest.raises(InputError, match=words):
        make_plan(make_trace(samples=40), make_profile(cases=("attention",)), cluster=Cluster.parse("1x2"))


def test_a_trace_without_the_size_of_experts_is_refused_by_name(make_trace: Any, make_profile: Any) -> None:
    with pytest.raises(InputError, match=r"none of experts.* ffn_size is not in the trace; say it at"):
        make_plan(make_trace(samples=40, ffn_size=None), make_profile())


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        ({"strategy": "exflow"}, {}, "coherent dispatch"),
        ({"strategy": "pipemoe"}, {}, "pipeline, not again"),
        ({"strategy": "eplb"}, {"strategy": "eplb"}, "leave --on away"),
        ({"strategy": "pipemoe"}, {"strategy": "exflow"}, "not beside pipeline"),
        ({"strategy": "eplb"}, {"cluster": Cluster.parse("2x2")}, "leave --cluster away"),
    ],
    ids=str,
)
def test_decisions_that_do_not_go_together_are_refused_by_name(
    make_trace: Any, make_profile: Any, tmp_path: Path, base: Any, changes: Any, words: str
) -> None:
    trace, profile = make_trace(samples=40), make_profile()
    on = placed(trace, profile, tmp_path / "base.json", **base)
    with pytest.raises(UsageError, match=words):
        make_plan(trace, profile, on=on, **changes)


def test_a_base_of_another_model_is_refused(make_trace: Any, make_profile: Any, tmp_path: Path) -> None:
    profile = make_profile()
    on = placed(make_trace(samples=40), profile, tmp_path / "base.json")
    with pytest.raises(MismatchError, match="same model"):
        make_plan(make_trace(samples=40, layers=4), profile, on=on)


def test_a_profile_by_which_a_layer_takes_ages_is_refused_before_a_plan_says_so(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    value = json.loads(make_profile().read_text())
    for series in value["series"].values():
        if series["case"] == "expert_ffn":
            series["fit"]["model"] = series["fit"]["alpha_beta"] = {"kind": "alpha_beta", "a_s": 1e-5, "b_s": 8e4}
    (tmp_path / "hostile.json").write_text(json.dumps(value))
    with pytest.raises(InputError, match=r"an MoE layer takes .* s by the profile"):
        make_plan(make_trace(samples=40, tokens=600), tmp_path / "hostile.json")


def test_a_fixed_capacity_needs_every_expert_once(make_trace: Any, make_profile: Any, tmp_path: Path) -> None:
    trace, profile = make_trace(samples=40), make_profile()
    on = placed(trace, profile, tmp_path / "base.json", redundant=4)
    with pytest.raises(UsageError, match="12 slots for 8 experts"):
        make_plan(trace, profile, on=on, capacity_factor=1.25)
