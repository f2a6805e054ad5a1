"""The Plan: what is written is what is read, and nothing else is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import InputError, MoeplanError
from moeplan.files import sha256_json
from moeplan.profilers.cluster import Cluster, Link
from moeplan.runtime.decisions import Decisions, PlacementDecision
from moeplan.runtime.plan import (
    Contender,
    Evaluation,
    FileInput,
    Inputs,
    Metric,
    Part,
    Plan,
    Split,
    TraceInput,
    Verdict,
    load,
    save,
)
from moeplan.solvers.outcome import Objective, Outcome, Status
from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.traces.model import Attention, ModelSpec

finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(1, 10**12)
sizes = st.integers(1, 2**31 - 1)
hashes = st.text("0123456789abcdef", min_size=64, max_size=64)
names = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
links = st.builds(Link, latency_s=st.floats(0, 10), s_per_byte=st.floats(1e-15, 0.5))
metrics = st.builds(Metric, value=finite, low=st.none() | finite, high=st.none() | finite)
contenders = st.builds(
    Contender,
    name=names,
    dispatch_model=st.sampled_from(["standard", "coherent", "migrating"]),
    metrics=st.dictionaries(names, metrics, max_size=3),
)
parts = st.builds(
    Part,
    num_samples=counts,
    num_tokens=counts,
    num_steps=counts,
    dropped_samples=st.integers(0, 9),
    contenders=st.lists(contenders, min_size=1, max_size=3).map(tuple),
)
outcomes = st.builds(
    Outcome,
    status=st.sampled_from(Status),
    objective=st.builds(Objective, name=names, value=finite, sense=st.sampled_from(["min", "max"])),
    bound=st.none() | finite,
    bound_kind=st.none() | names,
    gap=st.none() | finite,
    wall_s=finite.map(abs),
    backend=names,
)
traces = st.builds(
    TraceInput,
    path=names,
    sha256=hashes,
    num_tokens=counts,
    split=st.builds(Split, fit_fraction=st.floats(1e-6, 1), seed=st.integers(0, 2**63)),
)
files = st.builds(FileInput, path=st.none() | names, sha256=hashes)
verdicts = st.builds(Verdict, value=st.sampled_from(["benefit", "none"]), metric=names, against=names, gain=metrics)


@st.composite
def placements(draw: st.DrawFn, num_layers: int, num_experts: int, num_devices: int) -> Placement:
    """Random experts on every device; the last also holds what the others lack."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    slots = rng.integers(0, num_experts + 1, num_devices - 1)
    rows = []
    for _ in range(num_layers):
        held = [sorted(rng.choice(num_experts, size, replace=False).tolist()) for size in slots]
        rows.append([*held, list(range(num_experts))])
    return Placement.from_sets(rows, num_experts, draw(st.sampled_from(ReplicaRule)))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    num_experts = draw(st.integers(1, 9))
    layer_ids = tuple(sorted(draw(st.sets(st.integers(0, 99), min_size=1, max_size=4))))
    cluster = Cluster(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.dictionaries(st.sampled_from(["intra", "inter"]), links)),
    )
    placement = draw(placements(len(layer_ids), num_experts, cluster.num_devices))
    decision = PlacementDecision.of(placement, repaired=draw(st.integers(0, 9)))
    model = ModelSpec(
        name=draw(names),
        layer_ids=layer_ids,
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        hidden_size=draw(st.none() | sizes),
        attention=Attention(kv_size=draw(st.none() | sizes)),
    )
    return Plan.make(
        strategies=tuple(draw(st.lists(names, max_size=2))),
        seed=draw(st.integers(0, 2**63)),
        cluster=cluster,
        model=model,
        inputs=draw(st.builds(Inputs, trace=st.none() | traces, profile=st.none() | files, base=st.none() | files)),
        decisions=Decisions(placement=draw(st.none() | st.just(decision)), wire=draw(st.sampled_from([None, "fp8"]))),
        options=draw(st.dictionaries(names, st.dictionaries(names, json_values, max_size=3), max_size=2)),
        outcome=draw(st.dictionaries(names, outcomes, max_size=2)),
        evaluation=draw(st.none() | st.builds(Evaluation, fit=parts, held_out=st.none() | parts)),
        verdict=draw(st.none() | verdicts),
    )


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_a_saved_plan_is_loaded_as_it_was(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    save(plan, path)
    loaded = load(path)
    assert loaded == plan
    save(loaded, path.with_name("again.json"))
    assert path.read_bytes() == path.with_name("again.json").read_bytes()


def a_plan(**fields: Any) -> Plan:
    rows = [[[0, 1, 2], [2, 3]], [[0, 2, 3], [1, 3]]]
    return Plan.make(
        **{
            "strategies": ("exflow",),
            "seed": 0,
            "cluster": Cluster(1, 2, {"intra": Link(1e-6, 1e-9)}),
            "model": ModelSpec(name="m", layer_ids=(0, 1), num_experts=4, top_k=2),
            "inputs": Inputs(),
            "decisions": Decisions(placement=PlacementDecision.of(Placement.from_sets(rows, 4, ReplicaRule.EVEN))),
            **fields,
        }
    )


def test_the_hash_binds_decisions_cluster_and_model_and_nothing_else() -> None:
    plan = a_plan()
    assert a_plan(seed=9, strategies=("eplb",), options={"placement": {"seed": 1}}).plan_sha256 == plan.plan_sha256
    assert a_plan(cluster=Cluster(2, 1)).plan_sha256 != plan.plan_sha256
    assert a_plan(decisions=Decisions()).plan_sha256 != plan.plan_sha256
    other = ModelSpec(name="n", layer_ids=(0, 1), num_experts=4, top_k=2)
    assert a_plan(model=other).plan_sha256 != plan.plan_sha256


@pytest.mark.parametrize("option", [float("nan"), float("inf"), object()], ids=["nan", "infinity", "object"])
def test_a_plan_that_could_not_be_saved_cannot_be_made(option: object) -> None:
    with pytest.raises(ValueError, match=r"JSON|serialize"):
        a_plan(options={"placement": {"x": option}})


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


Edit = Callable[[dict[str, Any]], object]
# Edits of a plan that are hashed again, so that only the rule named refuses them, and what the message says.
EDITS: dict[str, tuple[Edit, str]] = {
    "expert twice on a device": (lambda p: placed(p, 0, [0, 0, 2, 2, 3]), "experts of a device ascend"),
    "expert missing": (lambda p: placed(p, 1, [0, 1, 2, 1, 2]), "leaves out expert 3"),
    "expert out of range": (lambda p: placed(p, 1, [0, 2, 9, 1, 3]), "names expert 9"),
    "absurd expert": (lambda p: placed(p, 1, [0, 2, 10**30, 1, 3]), "less than 65535"),
    "ragged layers": (lambda p: placed(p, 1, [0, 1, 2, 3]), "all with the same number"),
    "layers missing": (lambda p: decision(p)["physical_to_logical"].pop(), "expected 2 layers"),
    "other devices": (lambda p: decision(p).update(slots_per_device=[3, 1, 1]), "placement for 3 devices"),
    "other slots": (lambda p: decision(p).update(slots_per_device=[3, 3]), "one column a slot"),
    "unknown rule": (lambda p: decision(p).update(replica_rule="nearby"), "replica_rule"),
    "absurd cluster": (lambda p: p["cluster"].update(num_nodes=10**30), "at most 65,536 devices"),
    "impossible link": (lambda p: p["cluster"]["links"]["intra"].update(s_per_byte=0), "bandwidth"),
    "top-k beyond experts": (lambda p: p["model"].update(top_k=5), "top-5"),
    "other model": (lambda p: p["model"].update(layer_ids=[0, 1, 2]), "expected 3 layers"),
    "wrong version": (lambda p: p.update(schema_version=2), "plan of schema version 2"),
    "lengthy version": (lambda p: p.update(schema_version=["\n"] * 9999), "plan of schema version"),
    "no version": (lambda p: p.pop("schema_version"), "no schema_version"),
    "missing key": (lambda p: p.pop("inputs"), "inputs: Field required"),
    "unknown key": (lambda p: p.update({"a\nb": 1}), "a b: Extra inputs"),
    "no hash": (lambda p: p.update(plan_sha256="none"), "plan_sha256"),
    "infinite option": (lambda p: p.update(options={"placement": {"x": float("inf")}}), "finite number"),
    "deep option": (lambda p: p.update(options={"placement": {"x": nested(400)}}), "recursion"),
}
# Whole files that are no plan.
FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a plan"),
    "a Parquet file": (b"PAR1" + bytes(64) + b"PAR1", "not a plan"),
    "a list": (b"[1, 2]", "no schema_version"),
    "a profile": (b'{"schema_version": 2, "series": {}}', "a profile; expected a plan"),
    "NaN": (b'{"schema_version": NaN}', "NaN is not a finite number"),
    "a key twice": (b'{"schema_version": 1, "schema_version": 1}', "names a key twice"),
    "deep nesting": (b"[" * 100_000, "nested too deeply"),
    "a huge number": (b'{"schema_version": 1' + b"0" * 5000 + b"}", "not a plan"),
}


def decision(plan: dict[str, Any]) -> dict[str, Any]:
    placement: dict[str, Any] = plan["decisions"]["placement"]
    return placement


def placed(plan: dict[str, Any], layer: int, row: list[Any]) -> None:
    decision(plan)["physical_to_logical"][layer] = row


def assert_refused(path: Path, said: str) -> None:
    with pytest.raises(InputError) as refused:
        load(path)
    message = str(refused.value)
    assert message.startswith(f"{path}: ")
    assert said in message
    assert "\n" not in message
    assert len(message) < 500 + len(str(path))


@pytest.mark.parametrize("name", EDITS)
def test_a_plan_that_breaks_a_rule_is_refused_in_one_line_that_names_it(name: str, tmp_path: Path) -> None:
    edit, said = EDITS[name]
    plan = json.loads(a_plan().model_dump_json())
    edit(plan)
    if plan["plan_sha256"] != "none":
        plan["plan_sha256"] = sha256_json({part: plan[part] for part in ("decisions", "cluster", "model")})
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan).replace("Infinity", "1e999"))
    assert_refused(path, said)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_plan_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, said = FILES[name]
    path = tmp_path / "plan.json"
    assert_refused(path, "No such file")
    path.write_bytes(content)
    assert_refused(path, said)
    with path.open("wb") as stream:
        stream.truncate(2**31)  # sparse, and not read
    assert_refused(path, "2,147,483,648 bytes")
    assert_refused(tmp_path, "directory")


@pytest.mark.parametrize(
    "edit",
    [
        lambda plan: decision(plan).update(replica_rule="nearest"),
        lambda plan: plan["cluster"].update(num_nodes=2, devices_per_node=1),
        lambda plan: plan["model"].update(name="other"),
    ],
)
def test_a_plan_edited_after_it_was_written_is_refused(edit: Edit, tmp_path: Path) -> None:
    path, plan = tmp_path / "plan.json", json.loads(a_plan().model_dump_json())
    edit(plan)
    path.write_text(json.dumps(plan))
    assert_refused(path, "the file was changed after it was written")


def test_a_plan_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save(a_plan(), path)
    whole = path.read_bytes().rstrip()
    for size in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:size])
        assert_refused(path, "not a plan")


def test_a_failed_save_leaves_the_old_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save(a_plan(), path)
    before = path.read_bytes()
    with pytest.raises(MoeplanError):
        save(a_plan(seed=1), path / "inside")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
