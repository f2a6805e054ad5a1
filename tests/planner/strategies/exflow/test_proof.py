"""The proof of a thorough bound: a file beside the plan, which certify holds the bound against."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load as load_proof
from safetensors.numpy import save

from moeplan.errors import InputError
from moeplan.planner.certify import bounds, certify
from moeplan.planner.sidecars import dump_proof, parse_proof
from tests.planner.makers import assert_refused, edited, made, planned, said

PROVEN = "bound (by its prices)"
SHAPE = (2, 3, 7)
DAMAGED = [
    b"",
    b"\x00" * 8,
    b"\xff" * 300,
    b"not a proof of anything at all",
    save({"device": np.zeros(SHAPE)})[:-1],
    save({"device": np.zeros(SHAPE, np.float32)}),
    save({"device": np.zeros((2, 3, 8))}),
    save({"rack": np.zeros(SHAPE)}),
    save({"device": np.full(SHAPE, np.nan)}),
    save({"device": np.full(SHAPE, -np.inf)}),
    save({"device": np.full(SHAPE, 1e300)}),
    save({"device": np.zeros((100, 3, 7))}),
    b"x" * 10**6,
]


@pytest.fixture(scope="module")
def trace(make_trace: Any) -> Any:
    return make_trace(samples=60, tokens=20, layers=4)


@pytest.fixture(scope="module")
def thorough(trace: Any) -> Any:
    """A plan with the proof of its bound."""
    return made(trace, "exflow", "1x4", fit_fraction=1.0, bound="thorough")


def proven_by(thorough: Any, contents: bytes, folder: Path) -> Any:
    """The plan with a proof of these bytes, rightly named."""
    named = {"file": "mine.safetensors", "sha256": hashlib.sha256(contents).hexdigest()}
    (folder / named["file"]).write_bytes(contents)
    return edited(thorough.plan, "options.placement.search.proof", named)


@pytest.mark.parametrize("cluster", ["1x4", "2x2", "4x1"])
def test_a_thorough_bound_is_certified_by_the_prices_beside_the_plan(trace: Any, tmp_path: Path, cluster: str) -> None:
    asked: dict[str, Any] = {"cluster": cluster, "fit_fraction": 1.0, "to": tmp_path / "plan.json"}
    plan = planned(trace, bound="thorough", **asked)
    assert len(list(tmp_path.glob("bound-*.safetensors"))) == 1
    certificate = certify(plan, trace.path, folder=tmp_path)
    assert PROVEN in certificate.checks
    assert not any("three-layer" in what for what in certificate.unchecked)
    planned(trace, **asked)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_bound_may_be_what_its_prices_prove_and_no_tighter(trace: Any, thorough: Any, tmp_path: Path) -> None:
    simple = planned(trace, cluster="1x4", fit_fraction=1.0).outcome["placement"].bound
    tight = thorough.plan.outcome["placement"].bound
    (contents,) = thorough.sidecars.values()
    plan = proven_by(thorough, save({"device": 0.9 * load_proof(contents)["device"]}), tmp_path)

    def claimed(tightness: float) -> Any:
        bound = tightness * tight + (1 - tightness) * simple
        gap = 1 - plan.outcome["placement"].objective.value / bound
        claim = {"bound": bound, "gap": gap, "status": "feasible" if gap else "optimal"}
        return edited(plan, "outcome.placement", lambda outcome: outcome | claim)

    assert PROVEN in certify(claimed(0.05), trace.path, folder=tmp_path).checks
    for tightness in (1, 0.95):
        words = "tighter than what its prices prove"
        assert_refused(claimed(tightness), trace.path, words=words, folder=tmp_path)


def test_without_its_proof_a_bound_is_unchecked_and_it_says_why(
    trace: Any, thorough: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason(plan: Any) -> str:
        certificate = certify(plan, trace.path, folder=tmp_path)
        assert PROVEN not in certificate.checks
        return next(what for what in certificate.unchecked if "three-layer" in what)

    (name,) = thorough.sidecars
    assert f"no {name} beside the plan" in reason(thorough.plan)
    (tmp_path / name).write_bytes(b"another")
    assert_refused(thorough.plan, trace.path, words="has hash", folder=tmp_path)
    assert "names no proof" in reason(edited(thorough.plan, "options.placement.search.proof", None))
    thorough.save(tmp_path / "plan.json")
    monkeypatch.setattr(bounds, "MOST_GROUPS", 10)
    assert "too many groups" in reason(thorough.plan)


@pytest.mark.parametrize("contents", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_proof_is_refused(trace: Any, thorough: Any, tmp_path: Path, contents: bytes) -> None:
    assert_refused(proven_by(thorough, contents, tmp_path), trace.path, words="^[^\n]*proof[^\n]*$", folder=tmp_path)
    with pytest.raises(InputError, match="expected device or node"):
        parse_proof(contents, SHAPE)


def test_prices_of_a_level_that_the_plan_has_not_are_refused(trace: Any, thorough: Any, tmp_path: Path) -> None:
    plan = proven_by(thorough, save({"node": np.zeros((4, 8, 12))}), tmp_path)
    assert_refused(plan, trace.path, words="prices of a node", folder=tmp_path)


def test_where_the_simple_bound_stands_the_screen_says_why(make_trace: Any) -> None:
    trace = make_trace(samples=60, tokens=20, layers=3)
    plan = planned(trace, cluster="1x3", bound="thorough", fit_fraction=1.0)
    assert "\nno thorough bound of what stays on a device: slots hold replicas\n" in said(plan)


TABLES = arrays.arrays(np.float64, SHAPE, elements=st.floats(-1e18, 1e18))


@given(st.dictionaries(st.sampled_from(["device", "node"]), TABLES, min_size=1))
def test_a_proof_is_read_as_it_was_written(levels: dict[str, Any]) -> None:
    read = parse_proof(dump_proof(levels), SHAPE)
    assert dump_proof(read) == dump_proof(levels)
    assert read.keys() == levels.keys()
    assert all((read[name] == table).all() for name, table in levels.items())


@given(st.binary(max_size=400))
def test_any_other_bytes_are_one_error(contents: bytes) -> None:
    with pytest.raises(InputError, match=r"^.*$"):
        parse_proof(contents, SHAPE)
