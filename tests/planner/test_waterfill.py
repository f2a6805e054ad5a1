"""Shared experts as load: alike by both replays, in every row of a plan, and refused where SGLang does not fill up."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import CertificationError, UsageError
from moeplan.planner.certify import certify
from moeplan.planner.certify.naive import naive_replay
from moeplan.planner.compare import compare
from moeplan.planner.evaluate.journey import Journey
from moeplan.planner.evaluate.replay import replay
from moeplan.planner.evaluate.step_size import StepSize
from moeplan.planner.report.command import made_by
from moeplan.planner.report.compare import as_dict, compare_report
from moeplan.planner.solve import solve
from moeplan.runtime.exports import engines_of
from moeplan.solvers.placement import Placement, ReplicaRule
from tests.planner.certify.test_naive import assert_same
from tests.planner.makers import (
    assert_refused,
    counted,
    edited,
    judged,
    planned,
    request,
    said,
    scene_of,
    screen,
    sized,
    write_profile,
)


@pytest.fixture(scope="module")
def trace(make_trace: Any, tmp_path_factory: Any) -> Any:
    """Enough tokens for ranks to fill up, of a model with one shared expert."""
    return sized(
        make_trace(samples=120, tokens=12, experts=16),
        tmp_path_factory.mktemp("shared") / "trace",
        num_shared_experts=1,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def fills(trace: Any, path: Path, **asked: Any) -> Any:
    """A plan judged with shared experts as load."""
    return planned(trace, "eplb", "1x4", redundant=4, tokens_per_step=500, waterfill=True, to=path, **asked)


def in_equal_slots(rng: np.random.Generator, devices: int) -> Placement:
    """Eight experts, dealt in order, with others at random in two slots or fewer of every device beside them."""
    slots = -(-8 // devices) + 1

    def held(device: int) -> list[int]:
        own = [*range(device, 8, devices)]
        return [*own, *(one for one in rng.permutation(8).tolist() if one not in own)][:slots]

    return Placement.from_sets([[held(device) for device in range(devices)] for _ in range(3)], 8, ReplicaRule.EVEN)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32 - 1),
    cluster=st.sampled_from(["1x2", "2x2", "2x3"]),
    rule=st.sampled_from(["even", "nearest", "static", "round_robin", "quota", "lp"]),
    number=st.integers(60, 900),
    sequences=st.booleans(),
)
def test_both_replays_fill_up_alike(
    make_trace: Any, seed: int, cluster: str, rule: Any, number: int, sequences: bool
) -> None:
    """Token by token, whatever the step holds: ranks with few tokens, tokens in no step, cells not routed."""
    trace = make_trace(samples=80, tokens=9, seed=seed % 97, unrouted=0.2)
    size = StepSize("sequences" if sequences else "tokens", number)
    scene = replace(scene_of(trace, cluster, fraction=0.6, each=size), fills=True)
    placement = in_equal_slots(np.random.default_rng(seed), scene.cluster.num_devices)
    journey = Journey("standard", placement, replica_rule=rule)
    journeys = [journey, replace(journey, shared_at_home=True)]
    fast, slow = (how(scene, journeys, ports=True, between=True) for how in (replay, naive_replay))
    plain = replay(replace(scene, fills=False), [journey], ports=True, between=True)
    for row, again, (without,) in zip(fast, slow, plain, strict=True):
        for one, other in zip(row, again, strict=True):
            assert_same(one, other)
        filled, at_home = row
        assert (filled.slots == placement.slots + 1).all()
        ours, theirs, routed = ((one.blocks or one).loads for one in (filled, at_home, without))
        np.testing.assert_array_equal(ours.sum(axis=2), theirs.sum(axis=2), err_msg="one for every token")
        assert theirs.sum() > routed.sum()
        assert (ours >= routed).all()
        np.testing.assert_array_equal(at_home.counts, without.counts, err_msg="at home no copy is added")
        assert (filled.counts >= without.counts).all()


def test_a_plan_is_judged_with_shared_experts_and_says_what_filling_up_gives(trace: Any, path: Path) -> None:
    plan, plain = fills(trace, path), planned(trace, "eplb", "1x4", redundant=4, tokens_per_step=500)
    rows, without = judged(plan), judged(plain)
    assert plan.options["evaluation"]["waterfill"] is True
    assert "waterfill" not in plain.options["evaluation"]
    assert plan.decisions == plain.decisions
    filled, home = rows["plan/standard"], rows["plan, without waterfill/standard"]
    assert filled["balance"] < home["balance"]
    assert filled["device_copies"] > home["device_copies"] == without["plan/standard"]["device_copies"]
    assert rows["contiguous/standard"]["balance"] != without["contiguous/standard"]["balance"], "today fills up, too"
    told = said(plan)
    assert (
        f"load on the busiest device {filled['balance']:.2f}, and {home['balance']:.2f} with shared experts at" in told
    )
    assert " --waterfill " in f"{made_by(plan, None)} "
    assert engines_of(plan) == ("sglang",)
    assert {"vllm", "sglang"} <= {*engines_of(plain)}


def test_seconds_are_of_one_expert_more_on_every_device(trace: Any, tmp_path: Path, path: Path) -> None:
    profile = write_profile(tmp_path / "profile.json")
    plan = fills(trace, path, profile=profile)
    plain = planned(trace, "eplb", "1x4", redundant=4, tokens_per_step=500, profile=profile)
    filled, without = (judged(one)["contiguous/standard"]["experts_s"] for one in (plan, plain))
    assert filled > without
    assert certify(plan, trace.path, profile, folder=path.parent).replayed


def test_certify_fills_up_again(trace: Any, path: Path) -> None:
    for rule in ("even", "lp"):
        plan = fills(trace, path, replica_rule=rule)
        assert certify(plan, trace.path, None, folder=path.parent).replayed
    assert_refused(edited(plan, "options/evaluation/waterfill", False), trace.path, None, folder=path.parent)
    with pytest.raises(CertificationError, match=r"options.evaluation: 1 values missing or wrong"):
        certify(edited(plan, "options/evaluation/waterfill", "yes"), trace.path, None, folder=path.parent)


def test_more_slots_hold_the_shared_expert_too(trace: Any, path: Path) -> None:
    asked: dict[str, Any] = {"tokens_per_step": 500, "redundant": "auto"}
    plan, plain = (planned(trace, "eplb", "1x4", waterfill=fill, **asked) for fill in (True, False))
    ours, theirs = (one.options["placement"]["redundancy"]["candidates"] for one in (plan, plain))
    layers, each = trace.model.num_layers, trace.model.expert_bytes
    assert {one["memory_bytes"] - other["memory_bytes"] for one, other in zip(ours, theirs, strict=True)} == {
        layers * each
    }
    assert certify(plan, trace.path, None, folder=path.parent).replayed


def test_compare_judges_as_plans_were_judged_or_all_alike(trace: Any, path: Path) -> None:
    plan = fills(trace, path)
    planned(trace, "eplb", "1x4", redundant=4, tokens_per_step=500, to=path.parent / "plain.json")
    unasked = compare([path], trace.path)
    assert unasked.fills
    assert as_dict(unasked)["waterfill"] is True
    figures = {one.label: one.metrics["balance"].value for one in unasked.part.contenders}
    assert figures[f"{path}/standard"] == judged(plan)["plan/standard"]["balance"]
    assert figures[f"{path}, without waterfill/standard"] > figures[f"{path}/standard"]
    assert "where SGLang's waterfill puts them" in screen(compare_report, unasked)
    assert " --waterfill" in unasked.again
    with pytest.raises(UsageError, match=r"plan\.json was judged with --waterfill, .*plain\.json was not; give"):
        compare([path, path.parent / "plain.json"], trace.path)
    asked = compare([path.parent / "plain.json"], trace.path, waterfill=True)
    assert asked.part.contenders[0].metrics == unasked.part.contenders[0].metrics
    assert not compare([path.parent / "plain.json"], trace.path).fills


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"strategy": "auto"}, "--waterfill without --engine; expected --engine sglang"),
        ({"strategy": "auto", "engine": "vllm"}, "--waterfill with --engine vllm; expected --engine sglang"),
        ({"strategy": "exflow"}, "--waterfill with --strategy exflow under coherent dispatch; expected a placement"),
        ({"strategy": "netmoe"}, "--waterfill with --strategy netmoe; expected a placement alone"),
        ({"strategy": "eplb", "purpose": "training"}, "--waterfill in training; .*: give --for serving"),
        ({"strategy": "eplb", "dead": (1,)}, "--waterfill of devices with unequal slots"),
    ],
)
def test_what_no_engine_fills_up_is_refused(trace: Any, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        solve(request(trace, cluster="1x4", tokens_per_step=500, waterfill=True, **asked))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (
            None,
            "not known whether random has a shared expert; expected one per layer: import the trace with --hf-config",
        ),
        (0, "random has no shared experts per layer; SGLang's needs exactly one"),
        (2, "random has 2 shared experts per layer"),
    ],
)
def test_a_model_without_one_shared_expert_is_refused(
    trace: Any, tmp_path: Path, number: int | None, words: str
) -> None:
    other = sized(trace, tmp_path / "other", num_shared_experts=number)
    with pytest.raises(UsageError, match=words):
        planned(other, "eplb", "1x4", waterfill=True)


def test_counts_are_refused(trace: Any, tmp_path: Path, path: Path) -> None:
    counts = counted(trace, tmp_path / "counts")
    with pytest.raises(UsageError, match="counts do not say which devices a token visits; give a trace of tokens"):
        planned(counts, "eplb", "1x4", waterfill=True)
    fills(trace, path)
    with pytest.raises(UsageError, match="counts do not say which devices a token visits"):
        compare([path], counts.path)


def test_plans_that_no_engine_carries_are_not_compared_so(trace: Any, path: Path) -> None:
    planned(trace, "exflow", "1x4", tokens_per_step=500, to=path)
    with pytest.raises(
        UsageError, match="which decides placement for coherent dispatch; expected plans of a placement"
    ):
        compare([path], trace.path, waterfill=True)


def test_auto_for_sglang_fills_up_in_every_candidate(trace: Any, tmp_path: Path, path: Path) -> None:
    profile = write_profile(tmp_path / "profile.json")
    asked = {"profile": profile, "engine": "sglang", "tokens_per_step": 500}
    plan, plain = (planned(trace, "auto", "1x4", waterfill=fill, to=path, **asked) for fill in (True, False))
    today, without = (one.options["auto"]["tried"][0]["today"]["experts_s"] for one in (plan, plain))
    assert today > without
    assert certify(plan, trace.path, profile, folder=path.parent).replayed
