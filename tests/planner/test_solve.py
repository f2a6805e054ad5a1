"""Requests that are met, for any cluster and the same again, and what is refused before or when anything is read."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InputError, UsageError
from moeplan.planner.certify import certify
from moeplan.planner.loaded_plan import common_cluster, load_plans
from moeplan.planner.report.command import made_by
from moeplan.planner.request import Request, cluster_for
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.description import describe, on_cluster
from moeplan.profilers.profile import load as load_profile
from moeplan.profilers.profile import save
from moeplan.runtime.plan import load
from moeplan.runtime.plan import save as save_plan
from moeplan.solvers.outcome import Status
from tests.planner.makers import edited, made, planned

NAN = float("nan")


@pytest.mark.parametrize("strategy", ["exflow", "eplb", "contiguous"])
@pytest.mark.parametrize("cluster", ["1x3", "2x2", "8x1"])
def test_every_strategy_plans_for_any_cluster_and_its_plan_survives_the_disk(
    make_trace: Any, tmp_path: Path, strategy: str, cluster: str
) -> None:
    plan = planned(make_trace(), strategy, cluster, to=tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == plan


def test_a_base_without_links_takes_those_of_the_profile_and_one_with_links_keeps_them(
    make_trace: Any, tmp_path: Path
) -> None:
    slow, fast = (describe("2x2", [f"intra={rate}:2", f"inter={rate}:9"]) for rate in (50, 400))
    for name, cluster in (("bare", Cluster.parse("2x2")), ("linked", slow.cluster)):
        planned(make_trace(), "eplb", cluster, to=tmp_path / f"{name}.json")
    save(fast, tmp_path / "profile.json")
    for name, expected in (("bare", fast.cluster), ("linked", slow.cluster)):
        assert cluster_for(None, tmp_path / "profile.json", on=tmp_path / f"{name}.json") == expected
        assert cluster_for("2x2", tmp_path / "profile.json", on=tmp_path / f"{name}.json") == expected
    assert cluster_for(None, None, on=tmp_path / "bare.json") == Cluster.parse("2x2")
    given = ["intra=400:2", "inter=400:9"]
    assert cluster_for(None, None, given, on=tmp_path / "bare.json") == fast.cluster
    with pytest.raises(UsageError, match="whose links are its own"):
        cluster_for(None, None, given, on=tmp_path / "linked.json")


def test_a_plan_on_nodes_of_another_size_shares_the_profiles_link_as_they_do_and_its_command_says_so(
    make_trace: Any, tmp_path: Path
) -> None:
    described, trace = describe("2x4", ["intra=400:2", "inter=10:9:4"]), make_trace()
    save(described, tmp_path / "profile.json")
    for name, inter, links in (
        ("2x4", "inter=10:9:4", []),
        ("4x2", "inter=20:9:2", []),
        ("4x2", "inter=25:1:2", ["inter=25:1"]),
        ("4x2", "inter=25:1", ["inter=25:1:1"]),
    ):
        cluster = cluster_for(name, tmp_path / "profile.json", links)
        assert cluster == Cluster.parse(name, ["intra=400:2", inter])
        plan = planned(trace, "eplb", cluster, profile=tmp_path / "profile.json", to=tmp_path / "plan.json")
        words = made_by(plan, described).split()
        said = [word for flag, word in pairwise(words) if flag == "--link"]
        assert said == links
        assert cluster_for(name, tmp_path / "profile.json", said) == cluster
        loaded = load_plans([tmp_path / "plan.json"])
        if not links:
            assert common_cluster(loaded, described.cluster, timed=True) == cluster
            unchecked = certify(plan, trace.path, tmp_path / "profile.json").unchecked
            assert not [line for line in unchecked if "link" in line]


def test_a_link_given_times_what_crosses_it_in_place_of_the_profiles_curves(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    trace, measured, link, path = make_trace(), make_profile("2x2"), "inter=0.5:90", tmp_path / "plan.json"
    save(on_cluster(load_profile(measured), None, [link]), tmp_path / "given.json")
    by_curves, given, placed = (
        planned(trace, "eplb", cluster_for(None, profile, links), profile=profile, to=path)
        for profile, links in ((measured, []), (measured, [link]), (tmp_path / "given.json", []))
    )
    assert given.evaluation == placed.evaluation != by_curves.evaluation
    sources = given.options["seconds"]["sources"]
    assert sources["dispatch inter"] == "link inter"
    assert sources["dispatch intra"].startswith("all_to_all/")
    assert "link inter, which is not the profile's" in certify(given, trace.path, measured).unchecked
    assert made_by(given, load_profile(measured)).split("--link ")[1].startswith(f"{link} ")


def test_a_plan_on_one_of_another_profile_is_timed_by_the_curves_of_its_own(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    trace, newer, older, base = make_trace(), make_profile("2x2"), tmp_path / "older.json", tmp_path / "base.json"
    save(on_cluster(load_profile(newer), None, ["inter=0.5:90"]), older)
    planned(trace, "eplb", cluster_for(None, older), profile=older, to=base)
    assert cluster_for(None, older, on=base) == load_profile(older).cluster
    cluster = cluster_for(None, newer, on=base)
    assert cluster == load_profile(newer).cluster != load_profile(older).cluster
    solved = made(trace, "pipemoe", cluster, profile=newer, on=base).plan
    assert "link" not in solved.options["seconds"]["sources"]["dispatch inter"]
    assert not [line for line in certify(solved, trace.path, newer).unchecked if "link" in line]


def test_a_plan_on_one_that_ctrl_c_ended_is_not_interrupted_itself(make_trace: Any, tmp_path: Path) -> None:
    trace, path = make_trace(), tmp_path / "base.json"
    save_plan(edited(planned(trace, "eplb", "2x2"), "outcome/placement/status", "interrupted"), path)
    solved = made(trace, "netmoe", "2x2", on=path)
    assert solved.plan.outcome["placement"].status is Status.INTERRUPTED
    assert not solved.interrupted


def test_the_same_seed_gives_the_same_plan_and_another_seed_another_split(make_trace: Any) -> None:
    one, again, other = (planned(make_trace(samples=40), cluster="1x2", seed=seed) for seed in (1, 1, 2))
    assert one.plan_sha256 == again.plan_sha256
    assert one.evaluation == again.evaluation != other.evaluation


def test_a_request_that_a_trace_cannot_meet_says_what_could(make_trace: Any) -> None:
    with pytest.raises(InputError, match="--fit-fraction 1"):
        planned(make_trace(samples=1), cluster="1x2", fit_fraction=0.5)
    for changes, words in (
        ({"redundant": 3}, "--redundant 4"),
        ({"slots": 3}, "at least 4 a device"),
        ({"slots": 9}, "an expert once"),
        ({"strategy": "eplb", "dispatch_model": "coherent"}, "--dispatch"),
    ):
        with pytest.raises(UsageError, match=words):
            planned(make_trace(), **{"cluster": "1x2"} | changes)


def test_one_sample_alone_is_fitted_whole_unless_a_share_is_asked_for(make_trace: Any) -> None:
    alone, two = (planned(make_trace(samples=count), "eplb", cluster="1x2") for count in (1, 2))
    assert (alone.inputs.trace.split.fit_fraction, alone.evaluation.held_out) == (1.0, None)
    assert (two.inputs.trace.split.fit_fraction, two.evaluation.held_out.num_samples) == (0.5, 1)


@pytest.mark.parametrize(
    ("strategy", "changes", "words"),
    [
        ("magic", {}, "--strategy magic; expected one of auto, exflow, pipemoe"),
        ("exflow", {"max_load": NAN}, "--max-load nan; expected 1"),
        ("exflow", {"time_limit_s": 0.0}, "--time-limit"),
        ("exflow", {"method": "exact"}, "--method exact with --strategy exflow; expected annealing or sweeps"),
        ("exflow", {"method": "sweeps", "objective": "copies"}, "only annealing"),
        ("exflow", {"method": "annealing", "backend": "pulp"}, "--method ilp or paper"),
        ("exflow", {"groups": "whole", "redundant": 4}, "--groups whole with --redundant"),
        ("exflow", {"redundant": "auto"}, "--redundant auto; only eplb weighs how many"),
        ("eplb", {"dead": (4,)}, "device 4; expected 0 to 3"),
        ("eplb", {"pins": ((0, 9),)}, "device 9; expected 0 to 3"),
        ("eplb", {"dead": (0, 1, 2, 3)}, "expected a device that is alive"),
        ("eplb", {"dead": (1,), "pins": ((7, 1),)}, "--pin 7@1; device 1 is --dead"),
        ("eplb", {"quantile": 0.5, "method": "published"}, "--quantile with --method published"),
        ("eplb", {"groups": "whole", "redundant": "auto"}, "--groups whole with --redundant or --dead"),
        ("eplb", {"groups": "whole", "dead": (1,)}, "--groups whole with --redundant or --dead"),
        ("eplb", {"redundant": "auto", "slots": 5}, "--slots and --redundant both"),
        ("pipemoe", {"method": "unequal", "joint": True}, "--joint with --method unequal"),
        ("netmoe", {"mixture": (("t", 1.0),)}, "with --strategy netmoe; it is a flag of eplb"),
        ("eplb", {"mixture": (("t", 0.0),)}, "expected weights above 0"),
        ("eplb", {"mixture": (("t", NAN),)}, "expected weights above 0"),
        ("eplb", {"mixture": (("t", 1e300),)}, "expected weights above 0"),
        ("eplb", {"previous": "plan.json"}, "--from with --strategy eplb; only exflow re-plans"),
        ("exflow", {"previous": "plan.json", "on": "base.json"}, "--from with --on"),
        ("eplb", {"cluster": Cluster.parse("1x1")}, "there is nothing to place"),
        ("eplb", {"cluster": Cluster.parse("128x128")}, "16,384 devices; plans are made for at most 4,096"),
        ("eplb", {"fit_fraction": 1.5}, "--fit-fraction 1.5; expected above 0 and at most 1"),
        ("eplb", {"seed": -1}, "--seed -1; expected at least 0"),
        ("eplb", {"fit_fraction": NAN}, "--fit-fraction nan; expected above 0"),
        ("eplb", {"samples_per_step": 0}, "--samples-per-step 0; expected at least 1"),
        ("eplb", {"concurrency": 0}, "--concurrency 0; expected at least 1 and below 2^31"),
        ("eplb", {"tokens_per_step": 2**31}, "--tokens-per-step 2147483648; expected at least 1 and below 2^31"),
        (
            "eplb",
            {"samples_per_step": 8, "tokens_per_step": 9},
            "--samples-per-step and --tokens-per-step each say how",
        ),
        ("eplb", {"tokens_per_step": 8, "concurrency": 9}, "--tokens-per-step and --concurrency each say how large"),
        ("eplb", {"concurrency": 8, "purpose": "training"}, "--concurrency with --for training"),
        ("eplb", {"seed": 2**63}, "--seed 9223372036854775808; expected at least 0"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_met_is_refused_before_anything_is_read(
    strategy: str, changes: dict[str, Any], words: str
) -> None:
    settings: dict[str, Any] = {"trace": "nowhere", "cluster": Cluster.parse("2x2")}
    with pytest.raises(UsageError) as refused:
        Request.of(strategy=strategy, **settings | changes)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_parameter_that_no_strategy_has_is_an_error_of_the_caller() -> None:
    with pytest.raises(TypeError, match="colour"):
        Request.of(strategy="eplb", trace="t", cluster=Cluster.parse("2x2"), colour="red")
