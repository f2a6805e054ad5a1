"""Several traces with weights, planned for together, judged by weighted means."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.errors import MismatchError, UsageError
from moeplan.planner.certify import certify
from moeplan.planner.compare import compare
from moeplan.solvers import eplb
from moeplan.traces.split import fitted
from tests.planner.makers import assert_refused, balances, edited, fit_part, held_out, planned, tallied


def mixed(*mixture: tuple[Any, float], **settings: Any) -> Any:
    """A plan for traces with weights."""
    members = tuple((str(trace.path), weight) for trace, weight in mixture)
    return planned(mixture[0][0], "eplb", "1x4", mixture=members, **{"redundant": 4} | settings)


def test_loads_are_weighted_by_their_shares_and_so_is_what_judges(tmp_path: Path) -> None:
    (prefill, some), (decode, more) = (
        tallied(tmp_path / str(seed), seed=seed, steps=steps) for seed, steps in ((1, 30), (2, 44))
    )
    plan = mixed((prefill, 3.0), (decode, 1.0), method="refined")
    seen = [fit_part(loads).sum(axis=0) for loads in (some, more)]
    shares = sum(weight * one / one.sum(axis=1, keepdims=True) for weight, one in zip((0.75, 0.25), seen, strict=True))
    expected = eplb.solve(np.rint(shares * 2**40), plan.cluster, slots=5).placement
    np.testing.assert_array_equal(plan.placement.physical_to_logical, expected.physical_to_logical)
    ours = plan.evaluation.held_out.contenders[0].metrics["balance"]
    apart = [balances(plan, held_out(loads)).mean() for loads in (some, more)]
    assert ours.value == pytest.approx(0.75 * apart[0] + 0.25 * apart[1], rel=1e-12)
    assert ours.low < ours.value < ours.high
    assert plan.evaluation.held_out.num_steps == sum(len(held_out(loads)) for loads in (some, more))
    members = [(one["sha256"], one["weight"]) for one in plan.options["placement"]["mixture"]]
    assert members == [(prefill.sha256, 0.75), (decode.sha256, 0.25)]
    certificate = certify(plan, prefill.path)
    assert certificate.largest_difference < 1e-12
    assert {"metrics of every contender", "verdict", "objective"} <= {*certificate.checks}
    with pytest.raises(MismatchError, match="hash"):
        certify(plan, decode.path)
    for path, change in (
        ("evaluation.held_out.contenders.1.metrics.balance.low", lambda x: x + 1e-6),
        ("outcome.placement.objective.name", "step_balance"),
        ("options.placement.mixture.0.weight", 0.5),
        ("options.placement.mixture.1.weight", 0.5),
    ):
        assert_refused(edited(plan, path, change), prefill.path)
    assert_refused(edited(plan, "evaluation.held_out", None), words="with the wrong parts")
    gone = edited(plan, "options.placement.mixture.1.path", "s3://elsewhere/t")
    assert (
        "figures of a mixture, whose other traces are not here; put them where they were"
        in certify(gone, prefill.path).unchecked
    )


def test_a_weight_alone_decides_as_the_trace_alone_and_all_fitted_units_are_left_out(tmp_path: Path) -> None:
    one, other, third = (tallied(tmp_path / str(seed), seed=seed)[0] for seed in (1, 2, 3))
    both, alone = (mixed(*mixture, method="published") for mixture in (((one, 1e-6), (other, 1e6)), ((other, 1.0),)))
    assert both.decisions == alone.decisions
    weighed = mixed((one, 1), (other, 1), redundant="auto", to=tmp_path / "plan.json")
    assert len(weighed.options["placement"]["redundancy"]["candidates"]) == 5
    num_fitted = fitted(np.arange(40), seed=0, fraction=0.5).sum()
    for trace, left_out in ((one, num_fitted), (other, num_fitted), (third, 0)):
        assert compare([tmp_path / "plan.json"], trace.path).num_fitted == left_out


def test_tokens_mix_too_and_what_does_not_is_one_clear_refusal(make_trace: Any, tmp_path: Path) -> None:
    tokens, others = make_trace(samples=40, seed=1), make_trace(samples=60, seed=2)
    assert certify(mixed((tokens, 1.0), (others, 1.0)), tokens.path).largest_difference < 1e-12
    counts, samples = tallied(tmp_path / "t")[0], tallied(tmp_path / "u", keys=("sample",))[0]
    with pytest.raises(MismatchError, match="another model"):
        mixed((counts, 1.0), (tokens, 1.0))
    with pytest.raises(UsageError, match="splits by sample"):
        mixed((counts, 1.0), (samples, 1.0))
    with pytest.raises(UsageError, match="--quantile with several --trace"):
        mixed((counts, 1.0), (counts, 1.0), quantile=0.5)


def test_a_trace_of_few_steps_goes_with_one_of_many(make_trace: Any) -> None:
    short, long = (make_trace(samples=samples, tokens=4, seed=samples) for samples in (24, 200))
    plan = mixed((short, 1.0), (long, 1.0), samples_per_step=6)
    ours = plan.evaluation.held_out.contenders[0].metrics["balance"]
    assert ours.low < ours.value < ours.high
    assert "metrics of every contender" in certify(plan, short.path).checks


def test_tokens_per_step_of_a_mixture_are_weighted_as_its_traces_are(make_trace: Any) -> None:
    few, many = (make_trace(samples=24, tokens=tokens, seed=tokens) for tokens in (4, 12))
    plan = mixed((few, 3.0), (many, 1.0), samples_per_step=6)
    assert plan.evaluation.held_out.tokens_per_step == (3 * 6 * 4 + 1 * 6 * 12) / 4
    assert "metrics of every contender" in certify(plan, few.path).checks
