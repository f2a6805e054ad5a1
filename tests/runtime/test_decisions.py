from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InputError
from moeplan.files import sha256_file
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.active import activate
from moeplan.runtime.decisions import (
    DECISIONS,
    Decision,
    Decisions,
    PipelineDecision,
    SamplePolicyDecision,
    SidecarFile,
    sidecars_in,
)
from moeplan.runtime.plan import Plan, load, save
from moeplan.traces.model import ModelSpec
from tests.runtime.plans import made_plan

SHARES = ((1.0,), (1.0,), (0.4, 0.6))
MODEL = ModelSpec(name="small", layer_ids=(0, 1, 2), num_experts=4, top_k=2)


def made(**decisions: Any) -> Plan:
    return made_plan(Cluster.parse("1x2"), MODEL, **decisions)


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


class Toy(Decision):
    """A kind of decision that a test registers."""

    key = "toy"
    dispatch_models = ("standard",)

    sizes: tuple[int, ...]
    table: SidecarFile | None = None

    def check(self, model: ModelSpec, cluster: Cluster, /) -> None:
        if len(self.sizes) != cluster.num_devices:
            raise InputError(f"toy of {len(self.sizes)} sizes for {model.name}; expected {cluster.num_devices}")


@pytest.fixture
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DECISIONS, Toy.key, Toy)


@pytest.mark.usefixtures("_toy")
@pytest.mark.parametrize("given", [lambda toy: toy, lambda toy: toy.model_dump(mode="json")], ids=["record", "JSON"])
def test_a_registered_kind_of_decision_is_carried_like_those_of_the_product(tmp_path: Path, given: Any) -> None:
    (tmp_path / "t.safetensors").write_bytes(b"numbers")
    toy = Toy(sizes=(1, 2), table=SidecarFile(file="t.safetensors", sha256=sha256_file(tmp_path / "t.safetensors")))
    plan = made(pipeline=PipelineDecision(forward=(1, 1, 1), backward=None), toy=given(toy))
    assert plan.decisions.made == (plan.decisions.pipeline, toy)
    assert plan.decisions.names == ("pipeline", "toy")
    assert load_again(plan, tmp_path) == plan
    assert load_again(plan, tmp_path).decisions.made[1] == toy
    assert plan.plan_sha256 != made(toy=Toy(sizes=(2, 1))).plan_sha256
    active = activate(tmp_path / "plan.json", tmp_path / "job")
    assert (active.parent / "t.safetensors").read_bytes() == b"numbers"


def test_a_registered_kind_leaves_plans_without_it_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = made(sample_policy=policy())
    monkeypatch.setitem(DECISIONS, Toy.key, Toy)
    assert made(sample_policy=policy()).plan_sha256 == before.plan_sha256
    assert load_again(before, tmp_path) == before


@pytest.mark.usefixtures("_toy")
@pytest.mark.parametrize(
    ("decisions", "words"),
    [
        ({"toy": Toy(sizes=(1,))}, "toy of 1 sizes for small; expected 2"),
        ({"toy": {"sizes": [1, "2"]}}, "valid integer"),
        ({"toy": {"sizes": [1, 2], "other": 1}}, "Extra inputs"),
        ({"toy": Toy(sizes=(1, 2)), "dispatch": "coherent"}, "toy beside coherent dispatch; expected standard"),
        (
            {"toy": Toy(sizes=(1, 2)), "sample_policy": policy()},
            "sample_policy and toy, which no dispatch model carries",
        ),
        ({"game": {"sizes": [1, 2]}}, "decisions.game; this moeplan knows placement, pipeline, sample_policy, toy"),
    ],
    ids=str,
)
def test_a_registered_kind_is_checked(decisions: Any, words: str) -> None:
    with pytest.raises((InputError, ValueError), match=words):
        made(**decisions)


@pytest.mark.parametrize(
    ("decisions", "options", "expected"),
    [
        ({}, "coherent", "coherent"),
        ({"dispatch": "standard"}, "coherent", "standard"),
        ({"dispatch": "coherent"}, "standard", "coherent"),
        ({"dispatch": "migrating", "sample_policy": policy()}, "standard", "migrating"),
        ({"sample_policy": policy()}, "standard", "migrating"),
        ({"pipeline": PipelineDecision(forward=(1, 1, 1), backward=None)}, "standard", "standard"),
    ],
    ids=str,
)
def test_the_dispatch_decided_goes_before_that_of_the_options(
    decisions: Any, options: str, expected: str, tmp_path: Path
) -> None:
    plan = made(**decisions, options={"placement": {"dispatch_model": options}})
    assert plan.dispatch_model == expected
    assert load_again(plan, tmp_path) == plan


def test_the_dispatch_decided_is_bound_by_the_hash_and_no_kind_of_decision() -> None:
    hashes = {made(dispatch=model).plan_sha256 for model in (None, "standard", "coherent", "migrating")}
    assert len(hashes) == 4
    assert made().plan_sha256 in hashes
    assert "dispatch" not in made().model_dump(mode="json")["decisions"]
    assert made(dispatch="coherent").decisions.names == ()


@pytest.mark.parametrize(
    ("decisions", "words"),
    [
        (
            {"dispatch": "coherent", "pipeline": {"forward": (1, 1, 1), "backward": None}},
            "pipeline beside coherent dispatch; expected standard or migrating",
        ),
        ({"dispatch": "coherent", "sample_policy": policy()}, "sample_policy beside coherent dispatch"),
        ({"dispatch": "standard", "sample_policy": policy()}, "sample_policy beside standard dispatch"),
        ({"dispatch": "teleport"}, "standard"),
    ],
    ids=str,
)
def test_a_dispatch_that_contradicts_a_decision_is_refused(decisions: Any, words: str) -> None:
    with pytest.raises((InputError, ValueError), match=words):
        made(**decisions)


def test_every_kind_is_a_field_by_its_key() -> None:
    fields = {name: field.annotation for name, field in Decisions.model_fields.items() if name != "dispatch"}
    assert fields == {key: kind | None for key, kind in DECISIONS.items()}


def test_files_that_a_plan_names_are_found_at_any_depth() -> None:
    one, other = (SidecarFile(file=name, sha256=name * 64) for name in "ab")
    part = {"x": [{"y": one}, "file", 1.0], "z": {"deep": ({"file": "b", "sha256": "b" * 64},)}}
    assert [*sidecars_in(part)] == [one, other]
    assert [*sidecars_in(made(sample_policy=policy(predictor=one)))] == [one]
    assert not [*sidecars_in(made(sample_policy=policy()))]
