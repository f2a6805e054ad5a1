from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InputError
from moeplan.files import sha256_file
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.active import activate
from moeplan.runtime.decisions import Decisions, PipelineDecision, SamplePolicyDecision, SidecarFile
from moeplan.runtime.plan import Inputs, Plan, load, save
from moeplan.traces.model import ModelSpec

SHARES = ((1.0,), (1.0,), (0.4, 0.6))
MODEL = ModelSpec(name="small", layer_ids=(0, 1, 2), num_experts=4, top_k=2)


def made(**decisions: Any) -> Plan:
    options = decisions.pop("options", {})
    return Plan.make(
        strategies=(),
        seed=0,
        cluster=Cluster.parse("1x2"),
        model=MODEL,
        inputs=Inputs(),
        decisions=Decisions(**decisions),
        options=options,
    )


def shared(forward: Any, backward: Any = None) -> dict[str, Any]:
    """A pipeline of one, one and two chunks of these shares."""
    return {"forward": (1, 1, 2), "backward": None, "shares": {"forward": forward, "backward": backward}}


def policy(**changes: Any) -> SamplePolicyDecision:
    return SamplePolicyDecision(**{"method": "sum", "layers": (0, 2)} | changes)


def test_degrees_and_policies_survive_the_disk_and_are_part_of_the_hash(tmp_path: Path) -> None:
    hashes = set()
    for forward, backward in (((1, 2, 3), None), ((1, 2, 3), (1, 1, 1)), ((1, 2, 4), None)):
        plan = made(pipeline=PipelineDecision(forward=forward, backward=backward))
        save(plan, tmp_path / "plan.json")
        assert load(tmp_path / "plan.json") == plan
        hashes.add(plan.plan_sha256)
    plan = made(sample_policy=policy(predictor=SidecarFile(file="p.safetensors", sha256="a" * 64)))
    assert load_again(plan, tmp_path) == plan
    assert len({*hashes, plan.plan_sha256, made().plan_sha256}) == 5


def test_shares_and_a_capacity_survive_the_disk_and_are_part_of_the_hash(tmp_path: Path) -> None:
    plain = {"forward": (1, 1, 2), "backward": None}
    other = shared(((1.0,), (1.0,), (0.3, 0.7)))
    choices = [plain, shared(SHARES), other, plain | {"capacity_factor": 1.25}, plain | {"capacity_factor": 1.5}]
    plans = [made(pipeline=choice) for choice in choices]
    assert all(load_again(plan, tmp_path) == plan for plan in plans)
    assert len({plan.plan_sha256 for plan in plans}) == len(plans)


def load_again(plan: Plan, folder: Path) -> Plan:
    save(plan, folder / "plan.json")
    return load(folder / "plan.json")


def test_a_decision_that_is_absent_is_not_written(tmp_path: Path) -> None:
    plan = made(pipeline=PipelineDecision(forward=(1, 1, 1), backward=None))
    assert plan.model_dump(mode="json")["decisions"] == {"pipeline": {"forward": [1, 1, 1], "backward": None}}
    assert plan.decisions.names == ("pipeline",)


def test_a_sample_policy_makes_the_dispatch_migrating(tmp_path: Path) -> None:
    assert made(sample_policy=policy()).dispatch_model == "migrating"
    assert made().dispatch_model == "standard"


@pytest.mark.parametrize(
    ("decisions", "words"),
    [
        ({"pipeline": {"forward": (1, 2), "backward": None}}, "expected 3"),
        ({"pipeline": {"forward": (1, 2, 3), "backward": (1,)}}, "backward"),
        ({"pipeline": {"forward": (1, 0, 3), "backward": None}}, "greater than or equal to 1"),
        ({"pipeline": {"forward": (1, 10**9, 3), "backward": None}}, "less than or equal"),
        ({"pipeline": shared(((0.5,), (1.0,), (0.4, 0.6)))}, "forward shares of a layer sum to 0.5; expected 1"),
        ({"pipeline": shared(((1.0,), (1.0,), (1.0,)))}, "forward shares of other chunks than the degrees"),
        ({"pipeline": shared(((1.0,), (0.4, 0.6)))}, "forward shares of other chunks than the degrees"),
        ({"pipeline": shared(SHARES) | {"backward": (1, 1, 1)}}, "backward shares of other chunks than the degrees"),
        ({"pipeline": shared(SHARES, SHARES)}, "backward shares of other chunks than the degrees"),
        ({"pipeline": shared(((1.0,), (1.0,), (1e-9, 1 - 1e-9)))}, "greater than or equal to 0.00000001"),
        ({"pipeline": {"forward": (1, 1, 2), "backward": None, "capacity_factor": 0.0}}, "greater than 0"),
        ({"pipeline": {"forward": (1, 1, 2), "backward": None, "capacity_factor": 1025}}, "less than or equal to 1024"),
        ({"sample_policy": {"method": "sum", "layers": (2, 0)}}, "ascending"),
        ({"sample_policy": {"method": "sum", "layers": (0, 0)}}, "ascending"),
        ({"sample_policy": {"method": "sum", "layers": (3,)}}, "below 3"),
        (
            {"sample_policy": {"method": "sum", "layers": (0,), "predictor": {"file": "../x", "sha256": "a" * 64}}},
            "file",
        ),
        ({"sample_policy": {"method": "sum", "layers": (0,), "predictor": {"file": "x", "sha256": "short"}}}, "sha256"),
        (
            {
                "pipeline": {"forward": (1, 2, 3), "backward": None},
                "options": {"placement": {"dispatch_model": "coherent"}},
            },
            "coherent",
        ),
        (
            {
                "sample_policy": {"method": "sum", "layers": (0,)},
                "options": {"placement": {"dispatch_model": "coherent"}},
            },
            "coherent",
        ),
    ],
    ids=str,
)
def test_decisions_that_fit_neither_the_model_nor_one_another_are_refused(decisions: Any, words: str) -> None:
    with pytest.raises((InputError, ValueError), match=words):
        made(**decisions)


@pytest.mark.parametrize("damage", [None, "changed", "missing"])
def test_activate_takes_a_predictor_along_only_while_it_has_its_hash(tmp_path: Path, damage: str | None) -> None:
    sidecar = tmp_path / "p.safetensors"
    sidecar.write_bytes(b"numbers")
    named = SidecarFile(file=sidecar.name, sha256=sha256_file(sidecar))
    save(made(sample_policy=policy(predictor=named)), tmp_path / "plan.json")
    if damage == "changed":
        sidecar.write_bytes(b"others")
    elif damage == "missing":
        sidecar.unlink()
    if damage is None:
        active = activate(tmp_path / "plan.json", tmp_path / "job")
        assert (active.parent / sidecar.name).read_bytes() == b"numbers"
    else:
        with pytest.raises(InputError, match=r"p\.safetensors"):
            activate(tmp_path / "plan.json", tmp_path / "job")
        assert not (tmp_path / "job").exists()
