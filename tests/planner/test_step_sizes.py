"""The size of a step as it is asked for, as it is usual, and as plans keep it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.errors import InputError, UsageError
from moeplan.planner.certify import certify
from moeplan.planner.compare import compare
from moeplan.planner.evaluate.step_size import StepSize
from moeplan.runtime.plan import load
from moeplan.traces.schema import PHASES
from tests.builders import known
from tests.planner.makers import assert_refused, counted, edited, planned, rewritten, said

UNSAID: dict[str, Any] = {"samples_per_step": None}  # as at a terminal without flags
DEVICES = 4


def phased(trace: Any, folder: Path, *phases: str) -> Any:
    """The trace with tokens of these phases by turns."""
    ids = np.array([PHASES.index(phase) for phase in phases], np.int8)
    return rewritten(trace, folder, lambda batch: {"phase": ids[np.arange(len(batch)) % len(ids)]})


def kept(plan: Any) -> dict[str, Any]:
    """What a plan keeps of its steps."""
    names = ("use", "samples_per_step", "tokens_per_step", "concurrency", "as_prompts", "step")
    return {name: value for name in names if (value := plan.options["evaluation"].get(name))}


@pytest.mark.parametrize(
    ("phases", "asked", "use", "size", "words"),
    [
        (
            ("decode",),
            {},
            "decode",
            {"concurrency": 64 * DEVICES},
            "decode, 256 concurrent sequences: 256 tokens per step",
        ),
        (("prefill",), {}, "prefill", {"tokens_per_step": 4096 * DEVICES}, "prefill, 16,384 tokens per step"),
        (
            ("decode",),
            {"tokens_per_step": 256},
            "prefill",
            {"tokens_per_step": 256, "as_prompts": True},
            "prefill (decoded tokens, taken as if of prompts), 256 tokens per step",
        ),
        (("prefill", "decode"), {}, "prefill", {"tokens_per_step": 4096 * DEVICES}, "prefill, 16,384 tokens per step"),
        (("train",), {}, "training", {"tokens_per_step": 8192 * DEVICES}, "training, 32,768 tokens per step"),
        (("prefill",), {"purpose": "training"}, "training", {"tokens_per_step": 8192 * DEVICES}, "training, 32,768"),
        (("train",), {"purpose": "serving"}, "prefill", {"tokens_per_step": 4096 * DEVICES}, "prefill, 16,384 tokens"),
        (
            ("prefill",),
            {"concurrency": 20},
            "decode",
            {"concurrency": 20},
            "decode, 20 concurrent sequences: 20 tokens",
        ),
        (
            ("train",),
            {"samples_per_step": 3},
            "training",
            {"samples_per_step": 3},
            "training, 3 samples per step (30 tokens)",
        ),
    ],
)
def test_a_plan_says_what_runs_and_how_large_its_steps_are(
    make_trace: Any, tmp_path: Path, phases: Any, asked: Any, use: str, size: Any, words: str
) -> None:
    trace = phased(make_trace(), tmp_path / "trace", *phases)
    plan = planned(trace, "eplb", **UNSAID | asked)
    assert kept(plan) == {"use": use, "step": "derived", **size}
    assert words in " ".join(said(plan).split())
    certificate = certify(plan, trace.path)
    told = [what for what in certificate.unchecked if "(--for)" in what]
    assert told == ([f"that it was planned for {use} (--for)"] if "purpose" in asked else [])


@pytest.mark.parametrize("number", [0, -1, 2**31])
def test_a_size_out_of_range_is_refused_wherever_it_comes_from(number: int) -> None:
    with pytest.raises(UsageError, match=r"--tokens-per-step .* expected at least 1 and below 2"):
        StepSize("tokens", number)


def test_a_part_of_less_than_a_step_says_that_it_is_scaled_up(make_trace: Any) -> None:
    scaled, whole = (planned(make_trace(samples=40), "eplb", samples_per_step=number) for number in (100, 5))
    assert "a step is scaled up from the" in said(scaled)
    assert "a step is scaled up" not in said(whole)


def test_counts_without_a_size_are_taken_for_prefill_which_is_said(make_trace: Any, tmp_path: Path) -> None:
    counts = counted(make_trace(samples=40), tmp_path / "counts")
    words = "assuming prefill (counts carry no phase). Decode: --tokens-per-step <concurrent sequences>."
    assert words in said(planned(counts, "eplb", samples_per_step=None))
    assert "assuming prefill" not in said(planned(counts, "eplb", tokens_per_step=64))


def test_recorded_steps_are_used_whatever_size_is_given(make_trace: Any, tmp_path: Path) -> None:
    trace = phased(make_trace(samples=40, columns=("sample", "step")), tmp_path / "trace", "decode")
    plans = [planned(trace, "eplb", **UNSAID | asked) for asked in ({}, {"tokens_per_step": 9}, {"concurrency": 9})]
    assert [kept(plan) for plan in plans] == [{"use": "decode", "step": "recorded"}] * 3
    assert plans[0].evaluation == plans[1].evaluation == plans[2].evaluation
    assert plans[0].verdict.sizes == ()
    certify(plans[1], trace.path)


def test_gains_are_told_at_a_quarter_one_and_four_times_the_step(make_trace: Any) -> None:
    trace = make_trace(samples=80, tokens=20)
    plan = planned(trace, "eplb", tokens_per_step=100)
    sizes = {size.tokens_per_step: size.share for size in plan.verdict.sizes}
    assert [*sizes] == pytest.approx([25, 100, 400], rel=0.1)  # as the screen lists them, "certain from ... on"
    assert sizes[plan.evaluation.judging.tokens_per_step] == plan.verdict.share
    for tokens, share in sizes.items():
        again = planned(trace, "eplb", tokens_per_step=round(tokens / 25) * 25)
        assert again.plan_sha256 == plan.plan_sha256
        assert again.verdict.share.model_dump() == pytest.approx(share.model_dump())
    assert planned(trace, "exflow", tokens_per_step=100).verdict.sizes == ()  # copies go by tokens, not by steps


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("verdict.share.value", lambda value: value + 1e-3),
        ("verdict.share.low", lambda value: value + 1e-3),
        ("verdict.sizes.0.share.high", lambda value: value + 1e-3),
        ("verdict.sizes.2.tokens_per_step", lambda value: value + 1),
        ("verdict.sizes", lambda sizes: sizes[1:]),
        ("evaluation.held_out.tokens_per_step", lambda value: value + 1),
        ("options.evaluation.concurrency", 17),
        ("options.evaluation.tokens_per_step", 16),
        ("options.evaluation.use", "prefill"),
        ("options.evaluation.as_prompts", True),
    ],
)
def test_an_edited_size_or_share_is_refused(make_trace: Any, path: str, change: Any) -> None:
    trace = make_trace(samples=40)
    assert_refused(edited(planned(trace, "eplb", concurrency=16), path, change), trace.path)


def test_concurrent_sequences_need_samples_with_one_position_after_another(make_trace: Any, tmp_path: Path) -> None:
    trace = make_trace(samples=40)
    asked: dict[str, Any] = {"concurrency": 8}
    for other in (make_trace(samples=40, columns=()), counted(trace, tmp_path / "counts")):
        with pytest.raises(UsageError, match="no positions of samples, to run beside others: give --tokens-per-step"):
            planned(other, "eplb", **asked)
    with pytest.raises(UsageError, match="--concurrency with a sample policy"):
        planned(trace, "netmoe", **asked)
    apart = rewritten(trace, tmp_path / "apart", lambda batch: {"position": batch.position * 5})
    with pytest.raises(InputError, match=r"a sequence of 10 tokens spans 46 positions; .*give --tokens-per-step"):
        planned(apart, "eplb", **asked)


def test_a_comparison_takes_steps_of_the_first_plan_and_decode_never_by_whole_samples(
    make_trace: Any, tmp_path: Path
) -> None:
    trace = make_trace(samples=40)
    decode = phased(make_trace(samples=40, seed=1), tmp_path / "decode", "decode")
    tokens, lanes = tmp_path / "tokens.json", tmp_path / "lanes.json"
    planned(trace, "eplb", tokens_per_step=50, to=tokens)
    planned(trace, "eplb", concurrency=16, to=lanes)
    assert compare([tokens, lanes], trace.path).size == StepSize("tokens", 50)
    assert compare([lanes, tokens], trace.path).size == StepSize("sequences", 16)
    assert compare([tokens], decode.path).size == StepSize("sequences", 64 * DEVICES)
    assert compare([tokens], decode.path, size=StepSize("sequences", 9)).use == "decode"
    prompts = tmp_path / "prompts.json"
    planned(decode, "eplb", tokens_per_step=50, to=prompts)
    assert known(load(prompts).evaluation).judging.tokens_per_step == pytest.approx(50, rel=0.2)
    again = phased(make_trace(samples=40, seed=2), tmp_path / "again", "decode")
    assert compare([prompts], again.path).size == StepSize("tokens", 50), "decoded tokens stand for prompts there, too"
    sample = planned(trace, "netmoe", to=tmp_path / "moving.json")
    assert sample.decisions.sample_policy is not None
    assert compare([lanes, tmp_path / "moving.json"], trace.path).size == StepSize("tokens", 4096 * DEVICES)
    with pytest.raises(UsageError, match="--concurrency with a sample policy"):
        compare([tmp_path / "moving.json"], trace.path, size=StepSize("sequences", 9))
