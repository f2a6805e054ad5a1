"""The proof of a thorough bound: a file beside the plan, which certify holds the bound against."""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load as load_proof
from safetensors.numpy import save

from moeplan.errors import CertificationError, InputError
from moeplan.planner.certify import bounds, certify
from moeplan.planner.request import Request
from moeplan.planner.sidecars import dump_proof, parse_proof
from moeplan.planner.solve import Made, make
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Plan, load
from moeplan.traces.reader import Trace
from tests.planner.edits import edited
from tests.planner.makers import said

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
]


def made(trace: Trace, cluster: str = "1x4", **changes: Any) -> Made:
    request: dict[str, Any] = {"trace": str(trace.path), "cluster": Cluster.parse(cluster), "fit_fraction": 1.0}
    return make(Request.of(strategy="exflow", **request | changes))


@pytest.fixture(scope="module")
def trace(make_trace: Callable[..., Trace]) -> Trace:
    return make_trace(samples=60, tokens=20, layers=4)


@pytest.fixture(scope="module")
def thorough(trace: Trace) -> Made:
    found = made(trace, bound="thorough")
    assert len(found.sidecars) == 1
    return found


def proven_by(thorough: Made, contents: bytes, folder: Path) -> Plan:
    """The plan with a proof of these bytes, rightly named."""
    named = {"file": "mine.safetensors", "sha256": hashlib.sha256(contents).hexdigest()}
    (folder / named["file"]).write_bytes(contents)
    return edited(thorough.plan, "options.placement.search.proof", named)


def claimed(outcome: Any, bound: float) -> Any:
    gap = 1 - outcome["objective"]["value"] / bound
    return {**outcome, "bound": bound, "gap": gap, "status": "feasible" if gap else "optimal"}


@pytest.mark.parametrize("cluster", ["1x4", "2x2", "4x1"])
def test_a_thorough_bound_is_certified_by_the_prices_beside_the_plan(
    trace: Trace, tmp_path: Path, cluster: str
) -> None:
    made(trace, cluster, bound="thorough").save(tmp_path / "plan.json")
    plan = load(tmp_path / "plan.json")
    assert len(list(tmp_path.glob("bound-*.safetensors"))) == 1
    certificate = certify(plan, trace.path, folder=tmp_path)
    assert PROVEN in certificate.checks
    assert not any("three-layer" in what for what in certificate.unchecked)


def test_a_bound_may_be_what_its_prices_prove_and_no_tighter(trace: Trace, thorough: Made, tmp_path: Path) -> None:
    simple, tight = (found.plan.outcome["placement"].bound for found in (made(trace), thorough))
    assert simple is not None
    assert tight is not None
    (contents,) = thorough.sidecars.values()
    plan = proven_by(thorough, save({"device": 0.9 * load_proof(contents)["device"]}), tmp_path)
    loose = edited(plan, "outcome.placement", partial(claimed, bound=0.05 * tight + 0.95 * simple))
    assert PROVEN in certify(loose, trace.path, folder=tmp_path).checks
    for bound in (tight, 0.95 * tight + 0.05 * simple):
        forged = edited(plan, "outcome.placement", partial(claimed, bound=bound))
        with pytest.raises(CertificationError, match="tighter than what its prices prove"):
            certify(forged, trace.path, folder=tmp_path)


def test_without_its_proof_a_bound_is_unchecked_and_it_says_why(
    trace: Trace, thorough: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason(plan: Plan) -> str:
        certificate = certify(plan, trace.path, folder=tmp_path)
        assert PROVEN not in certificate.checks
        return next(what for what in certificate.unchecked if "three-layer" in what)

    (name,) = thorough.sidecars
    assert f"no {name} beside the plan" in reason(thorough.plan)
    assert "names no proof" in reason(edited(thorough.plan, "options.placement.search.proof", None))
    thorough.save(tmp_path / "plan.json")
    monkeypatch.setattr(bounds, "MOST_GROUPS", 10)
    assert "too many groups" in reason(thorough.plan)


def test_another_proof_than_the_plan_names_is_refused(trace: Trace, thorough: Made, tmp_path: Path) -> None:
    thorough.save(tmp_path / "plan.json")
    (name,) = thorough.sidecars
    contents = bytearray((tmp_path / name).read_bytes())
    contents[-1] ^= 1
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(CertificationError, match="has hash"):
        certify(thorough.plan, trace.path, folder=tmp_path)


@pytest.mark.parametrize("contents", [*DAMAGED, b"x" * 10**6], ids=range(len(DAMAGED) + 1))
def test_a_damaged_proof_is_refused_in_one_line(trace: Trace, thorough: Made, tmp_path: Path, contents: bytes) -> None:
    with pytest.raises(CertificationError, match="proof") as refused:
        certify(proven_by(thorough, contents, tmp_path), trace.path, folder=tmp_path)
    assert "\n" not in str(refused.value)
    if contents in DAMAGED:
        with pytest.raises(InputError, match="expected device or node"):
            parse_proof(contents, SHAPE)


def test_prices_that_prove_less_than_the_bound_or_that_are_of_a_level_it_has_not_are_refused(
    trace: Trace, thorough: Made, tmp_path: Path
) -> None:
    nothing = np.zeros((4, 8, 12))
    with pytest.raises(CertificationError, match="tighter than what its prices prove"):
        certify(proven_by(thorough, save({"device": nothing}), tmp_path), trace.path, folder=tmp_path)
    with pytest.raises(CertificationError, match="prices of a node"):
        certify(proven_by(thorough, save({"node": nothing}), tmp_path), trace.path, folder=tmp_path)


def test_a_replaced_plans_proof_goes_with_it(trace: Trace, thorough: Made, tmp_path: Path) -> None:
    thorough.save(tmp_path / "plan.json")
    made(trace).save(tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_where_the_simple_bound_stands_the_screen_says_why(make_trace: Callable[..., Trace]) -> None:
    plan = made(make_trace(samples=60, tokens=20, layers=3), "1x3", bound="thorough").plan
    assert "\nno thorough bound of what stays on a device: slots hold replicas\n" in said(plan)


@given(
    st.dictionaries(
        st.sampled_from(["device", "node"]),
        arrays.arrays(np.float64, SHAPE, elements=st.floats(-1e18, 1e18)),
        min_size=1,
    )
)
def test_a_proof_is_read_as_it_was_written(levels: dict[str, Any]) -> None:
    found = parse_proof(dump_proof(levels), SHAPE)
    assert dump_proof(found) == dump_proof(levels)
    assert found.keys() == levels.keys()
    assert all((found[name] == table).all() for name, table in levels.items())


@given(st.binary(max_size=400))
def test_any_other_bytes_are_one_error(contents: bytes) -> None:
    with pytest.raises(InputError, match=r"^.*$"):
        parse_proof(contents, SHAPE)
