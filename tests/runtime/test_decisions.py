"""Decisions of plans, of the product's kinds and registered ones, and the active plan: which it is, how it is set."""

import errno
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from moeplan.errors import InputError, StorageError
from moeplan.files import sha256_file
from moeplan.profilers.cluster import Cluster
from moeplan.runtime import load_plan
from moeplan.runtime.active import activate
from moeplan.runtime.decisions import (
    DECISIONS,
    Decision,
    Decisions,
    PipelineDecision,
    PlacementDecision,
    SamplePolicyDecision,
    SidecarFile,
    sidecars_in,
)
from moeplan.runtime.plan import Plan, load, save
from moeplan.solvers.luffy import Law
from moeplan.solvers.placement import ReplicaRule
from moeplan.traces.model import ModelSpec
from tests.runtime.plans import COSTS, eager, made_plan

SHARES = ((1.0,), (1.0,), (0.4, 0.6))
POLICY = {"method": "sum", "layers": (0, 2)}
COHERENT = {"options": {"placement": {"dispatch_model": "coherent"}}}
MODEL = ModelSpec(name="small", layer_ids=(0, 1, 2), num_experts=4, top_k=2)


def made(**decisions: Any) -> Plan:
    return made_plan(Cluster.parse("1x2"), MODEL, **decisions)


def cut(forward: Any = (1, 1, 2), backward: Any = None, **more: Any) -> dict[str, Any]:
    """A pipeline of these degrees."""
    return {"pipeline": {"forward": forward, "backward": backward} | more}


def shared(forward: Any, backward: Any = None, degrees: Any = None) -> dict[str, Any]:
    """A pipeline of one, one and two chunks of these shares."""
    return cut(backward=degrees, shares={"forward": forward, "backward": backward})


def policy(**changes: Any) -> SamplePolicyDecision:
    return SamplePolicyDecision(**POLICY | changes)


def following(*held: tuple[int, ...], rule: ReplicaRule = ReplicaRule.QUOTA, **changes: Any) -> dict[str, Any]:
    """Replicas that follow the load, from these experts on each device."""
    slots = len(held[0]) if len({*map(len, held)}) == 1 else tuple(map(len, held))
    start = PlacementDecision(
        slots_per_device=slots, physical_to_logical=(sum(held, ()),) * 3, replica_rule=rule, repaired=0
    )
    return {"rebalancing": eager(start, **changes)}


def condensing(**fields: Any) -> dict[str, Any]:
    """Rows that others stand for."""
    return {"condensation": fields}


def test_decisions_survive_the_disk_and_are_part_of_the_hash(tmp_path: Path) -> None:
    other = shared(((1.0,), (1.0,), (0.3, 0.7)))
    choices = [{}, cut(), cut((1, 1, 4)), cut(backward=(1, 1, 1)), shared(SHARES), other]
    choices += [cut(capacity_factor=1.25), cut(capacity_factor=1.5)]
    choices += [following((0, 1), (2, 3)), following((0, 1), (2, 3), trigger=1.1)]
    laws = (Law(1e-5, 1e-6, 1e-9, start_s=start_s) for start_s in (0.0, 2e-5))
    choices += [{"sample_policy": policy(method="joint", attention=law)} for law in laws]
    choices += [{"sample_policy": policy(predictor=SidecarFile(file="p.safetensors", sha256="a" * 64))}]
    star = {"criterion": "star", "threshold": 0.8}
    choices += [condensing(), condensing(tau=0.0), condensing(tau=0.08, layers=(0, 2), gains=((0.5,) * 4,) * 3)]
    choices += [condensing(tau=0.08, schedule="share", target=0.5), condensing(tau=0.08, medoid=True)]
    choices += [
        condensing(**star),
        condensing(**star, s1=0.9, s2=0.3),
        condensing(**star, schedule="share", target=0.0),
    ]
    choices += [condensing(criterion="star", schedule="paper", h_max=0.5)]
    plans = [made(**choice) for choice in choices]
    assert all(load_again(plan, tmp_path) == plan for plan in plans)
    assert len({plan.plan_sha256 for plan in plans}) == len(plans)


def load_again(plan: Plan, folder: Path) -> Plan:
    save(plan, folder / "plan.json")
    return load(folder / "plan.json")


def test_a_decision_that_is_absent_is_not_written(tmp_path: Path) -> None:
    plan = made(pipeline=PipelineDecision(forward=(1, 1, 1), backward=None))
    assert plan.model_dump(mode="json")["decisions"] == {"pipeline": {"forward": [1, 1, 1], "backward": None}}
    assert plan.decisions.names == ("pipeline",)


@pytest.mark.parametrize(
    ("decisions", "words"),
    [
        (cut((1, 2)), "expected 3"),
        (cut((1, 2, 3), (1,)), "backward"),
        (cut((1, 0, 3)), "greater than or equal to 1"),
        (shared(((0.5,), (1.0,), (0.4, 0.6))), "forward shares of a layer sum to 0.5; expected 1"),
        (shared(((1.0,), (0.4, 0.6))), "forward shares of other chunks than the degrees"),
        (shared(SHARES, degrees=(1, 1, 1)), "backward shares of other chunks than the degrees"),
        (shared(SHARES, SHARES), "backward shares of other chunks than the degrees"),
        (shared(((1.0,), (1.0,), (1e-9, 1 - 1e-9))), "greater than or equal to 0.00000001"),
        (cut(capacity_factor=0.0), "greater than 0"),
        (cut(capacity_factor=1025), "less than or equal to 1024"),
        ({"sample_policy": {"method": "sum", "layers": (0, 0)}}, "ascending"),
        ({"sample_policy": {"method": "sum", "layers": (3,)}}, "below 3"),
        ({"sample_policy": POLICY | {"predictor": {"file": "../x", "sha256": "a" * 64}}}, "file"),
        ({"sample_policy": POLICY | {"predictor": {"file": "x", "sha256": "short"}}}, "sha256"),
        (cut() | COHERENT, "coherent"),
        (cut() | {"dispatch": "coherent"}, "pipeline beside coherent dispatch; expected standard or migrating"),
        ({"dispatch": "coherent", "sample_policy": POLICY}, "sample_policy beside coherent dispatch"),
        ({"dispatch": "standard", "sample_policy": POLICY}, "sample_policy beside standard dispatch"),
        ({"dispatch": "teleport"}, "standard"),
        (
            following((0, 1), (2, 3), rule=ReplicaRule.EVEN),
            "or not by quota; expected equal slots per device and quota",
        ),
        (following((0, 1, 2), (0, 1, 2, 3)), "rebalancing from unequal slots"),
        (following((0, 1), (2, 2)), "the experts of a device ascend, each once"),
        (following((0, 1), (2, 3), costs=COSTS._asdict() | {"pair_s": -1.0}), "none below 0"),
        (following((0, 1), (2, 3), costs={"pair_s": 1.0}), "rebalancing by costs of pair_s; expected pair_s, copy_b"),
        (following((0, 1), (2, 3)) | {"dispatch": "migrating"}, "rebalancing beside migrating dispatch"),
        (condensing(tau=-0.1), "greater than or equal to 0"),
        (condensing(tau=0.1, threshold=0.8), "criterion gate under schedule fixed takes no threshold"),
        (condensing(criterion="star"), "criterion star under schedule fixed needs a threshold"),
        (condensing(criterion="star", threshold=1.1), "less than or equal to 1"),
        (condensing(criterion="star", threshold=0.8, s1=0.3, s2=0.3), "s1 0.3 and s2 0.3; expected s1 above s2"),
        (condensing(criterion="star", threshold=0.8, s1=0.3), "s1 0.3 and s2 None; expected s1 above s2"),
        (condensing(tau=0.1, s1=0.9, s2=0.3), "criterion gate under schedule fixed takes no s1"),
        (condensing(tau=0.1, schedule="share", target=1.0), "less than 1"),
        (condensing(tau=0.1, schedule="share", target=-0.1), "greater than or equal to 0"),
        (condensing(tau=0.1, schedule="share"), "criterion gate under schedule share needs a target"),
        (condensing(tau=0.0, schedule="share", target=0.5), "schedule share from tau 0; expected a start that"),
        (condensing(criterion="star", threshold=1.0, schedule="share", target=0.5), "schedule share from cosine 1"),
        (condensing(tau=0.1, schedule="paper", h_max=0.5), "schedule paper moves a cosine; expected criterion star"),
        (condensing(tau=0.1, layers=(0, 3)), "condensation of layers .0, 3.; expected ascending ordinals below 3"),
        (condensing(tau=0.1, gains=((1.0,) * 4,)), "expected 3 layers of 4 experts"),
        (condensing(tau=0.1) | {"dispatch": "migrating"}, "condensation beside migrating dispatch; expected standard"),
        (condensing(tau=0.1) | {"dispatch": "coherent"}, "condensation beside coherent dispatch; expected standard"),
        (condensing(tau=0.1) | {"sample_policy": POLICY}, "sample_policy and condensation, which no dispatch model"),
        (condensing(tau=0.1) | cut(capacity_factor=1.0), "a fixed capacity beside condensation"),
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


@pytest.mark.parametrize("unwritten", ["copyfile", "write_bytes"])
def test_a_plan_that_a_full_disk_keeps_from_becoming_active_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unwritten: str
) -> None:
    sidecar = tmp_path / "p.safetensors"
    sidecar.write_bytes(b"numbers")
    named = SidecarFile(file=sidecar.name, sha256=sha256_file(sidecar))
    save(made(sample_policy=policy(predictor=named)), tmp_path / "plan.json")
    writer: Any = shutil if unwritten == "copyfile" else Path
    monkeypatch.setattr(writer, unwritten, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(StorageError, match="nothing was changed"):
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


WITHOUT_TOY = made(sample_policy=policy())


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
    assert load_again(WITHOUT_TOY, tmp_path) == WITHOUT_TOY
    assert made(sample_policy=policy()).plan_sha256 == WITHOUT_TOY.plan_sha256
    save(plan, tmp_path / "plan.json")
    (tmp_path / "job" / ".moeplan" / "active.json").mkdir(parents=True)  # nothing can be written there
    with pytest.raises(StorageError):
        activate(tmp_path / "plan.json", tmp_path / "job")
    assert not (tmp_path / "job" / ".moeplan" / "t.safetensors").exists()
    active = activate(tmp_path / "plan.json", tmp_path / "other")
    assert (active.parent / "t.safetensors").read_bytes() == b"numbers"


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
        (
            {"game": {"sizes": [1, 2]}},
            "decisions.game; this moeplan knows placement, pipeline, sample_policy, rebalancing, condensation, toy",
        ),
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
def test_the_dispatch_decided_goes_before_options(decisions: Any, options: str, expected: str, tmp_path: Path) -> None:
    plan = made(**decisions, options={"placement": {"dispatch_model": options}})
    assert plan.dispatch_model == expected
    assert load_again(plan, tmp_path) == plan


def test_the_dispatch_decided_is_bound_by_the_hash_and_no_kind_of_decision() -> None:
    hashes = {made(dispatch=model).plan_sha256 for model in (None, "standard", "coherent", "migrating")}
    assert len(hashes) == 4
    assert made().plan_sha256 in hashes
    assert "dispatch" not in made().model_dump(mode="json")["decisions"]
    assert made(dispatch="coherent").decisions.names == ()


def test_every_kind_is_a_field_by_its_key_and_the_files_it_names_are_found_at_any_depth() -> None:
    beside = ("dispatch", "wire")
    fields = {name: field.annotation for name, field in Decisions.model_fields.items() if name not in beside}
    assert fields == {key: kind | None for key, kind in DECISIONS.items()}
    first, other = (SidecarFile(file=name, sha256=name * 64) for name in "ab")
    part = {"x": [{"y": first}, "file", 1.0], "z": {"deep": ({"file": "b", "sha256": "b" * 64},)}}
    assert [*sidecars_in(part)] == [first, other]
    assert [*sidecars_in(made(sample_policy=policy(predictor=first)))] == [first]
    assert not [*sidecars_in(made(sample_policy=policy()))]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, without an active plan."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOEPLAN_PLAN", raising=False)
    return tmp_path


def written(path: Path, seed: int) -> Path:
    save(made(seed=seed), path)
    return path


def test_the_active_plan_is_a_byte_copy(empty: Path) -> None:
    plan = written(empty / "plan.json", 1)
    plan.write_bytes(plan.read_bytes() + b"\n\n")
    assert activate(plan) == Path(".moeplan/active.json")
    assert (empty / ".moeplan" / "active.json").read_bytes() == plan.read_bytes()
    assert [path.name for path in (empty / ".moeplan").iterdir()] == ["active.json"]


@pytest.mark.parametrize("content", [b"", b"{}", None], ids=["empty", "no plan", "missing"])
def test_what_is_no_plan_does_not_become_active(content: bytes | None, empty: Path) -> None:
    activate(written(empty / "plan.json", 1))
    if content is not None:
        (empty / "bad.json").write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.json"):
        activate(empty / "bad.json")
    assert load_plan().seed == 1


def test_a_given_path_goes_before_the_variable_before_the_active(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"MOEPLAN_PLAN is not set.*moeplan apply"):
        load_plan()
    activate(written(empty / "plan.json", 1))
    assert load_plan().seed == 1
    monkeypatch.setenv("MOEPLAN_PLAN", str(empty / "named.json"))
    with pytest.raises(InputError, match=r"named\.json"):
        load_plan()
    written(empty / "named.json", 2)
    assert load_plan().seed == 2
    assert load_plan(written(empty / "given.json", 3)).seed == 3


def test_the_nearest_active_plan_upward_is_found(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    activate(written(empty / "plan.json", 1))
    inner = empty / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert load_plan().seed == 1
    assert activate(written(empty / "plan.json", 2), empty / "a") == empty / "a" / ".moeplan" / "active.json"
    assert load_plan().seed == 2
    monkeypatch.chdir(empty)
    assert load_plan().seed == 1
