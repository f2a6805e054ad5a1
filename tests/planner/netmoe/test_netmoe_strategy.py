"""NetMoE as a strategy: exchanges against a token-by-token twin, Figure 2, the ablation, verdicts, certificates."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.errors import CertificationError, InputError, MoeplanError
from moeplan.files import sha256_json
from moeplan.planner.certify import certify
from moeplan.planner.certify.certificate import Certificate
from moeplan.planner.certify.sample_policy import check_sample_policy, check_sample_policy_structure
from moeplan.planner.netmoe.counted import Traffic, count_samples
from moeplan.planner.netmoe.online import rehome
from moeplan.planner.netmoe.report import sample_policy_lines
from moeplan.planner.netmoe.roll import Roll, call_roll
from moeplan.planner.netmoe.tallied import tallied
from moeplan.planner.request import Request
from moeplan.planner.solve import Made, make
from moeplan.planner.survey import Cohort
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.profile import load as load_profile
from moeplan.runtime.plan import Part, Plan, parse
from moeplan.solvers import contiguous
from moeplan.traces.count_form import CountTable, CountTrace, open_any, read_counts, write_counts
from moeplan.traces.importers import import_trace
from moeplan.traces.model import ModelSpec
from moeplan.traces.reader import Trace
from moeplan.traces.schema import TraceMeta

MakeTrace = Callable[..., Trace]
FIG_2 = np.array([[0, 0, 3, 1], [1, 2, 1, 0], [1, 1, 0, 2], [3, 0, 0, 1]])  # expert i is on device i


def solved(trace: Trace | CountTrace, cluster: str = "2x2", links: tuple[str, ...] = (), **options: Any) -> Made:
    request = Request(strategy="netmoe", trace=trace.path, cluster=Cluster.parse(cluster, links), **options)
    return make(request)


def judged(plan: Plan) -> dict[str, dict[str, float]]:
    assert plan.evaluation is not None
    part = plan.evaluation.held_out or plan.evaluation.fit
    return {c.label: {name: metric.value for name, metric in c.metrics.items()} for c in part.contenders}


def part_of(plan: Plan) -> Part:
    assert plan.evaluation is not None
    assert plan.evaluation.held_out is not None
    return plan.evaluation.held_out


def certificate_of(made: Made, trace: Trace | CountTrace, folder: Path, profile: Path | None = None) -> Certificate:
    made.save(folder / "plan.json")
    certificate = Certificate()
    timed_by = None if profile is None else load_profile(profile)
    check_sample_policy(made.plan, trace, timed_by, certificate, lambda _: None, folder=folder)
    return certificate


def generated(folder: Path, *, alpha: float, samples: int = 256, layers: int = 3, seed: int = 0) -> CountTrace:
    """Counts of samples with preferences Dirichlet(alpha / E) that a chain of experts carries from layer to layer."""
    rng = np.random.default_rng(seed)
    experts, chain = 8, rng.dirichlet(np.full(8, 0.1), (layers - 1, 8))
    counts = np.zeros((samples, layers, experts), np.int64)
    for i in range(samples):
        counts[i, 0] = rng.multinomial(512, rng.dirichlet(np.full(experts, alpha / experts)))
        for layer in range(1, layers):
            counts[i, layer] = sum(map(rng.multinomial, counts[i, layer - 1], chain[layer - 1]))
    model = ModelSpec(
        name="generated", layer_ids=tuple(range(layers)), num_experts=8, top_k=2, hidden_size=64, dtype_bytes=2
    )
    table = CountTable(
        sample=np.repeat(np.arange(samples), layers),
        layer=np.tile(np.arange(layers, dtype=np.int32), samples),
        counts=counts.reshape(-1, experts),
    )
    write_counts(folder, TraceMeta(form="counts", model=model, recorder="test"), [table])
    return read_counts(folder)


def test_figure_2_leaves_2_of_5_tokens_a_node_to_cross() -> None:
    cluster = Cluster(2, 2)
    traffic = Traffic.empty(contiguous.solve(1, 4, cluster).placement, 4, cluster, linked=False)
    traffic.copies[:, 0] = FIG_2
    who, step = np.arange(4), np.zeros(4, int)
    found = rehome("sum", traffic, who, who, step, cluster, predict=lambda *_: None, copy_bytes=None)
    roll = Roll(who, None, None, FIG_2.sum(axis=1), FIG_2.sum(axis=1))
    cohort = Cohort(who, roll.tokens, who, step, None, 1, 0)
    ports = tallied(roll, traffic, who, cohort, found.device, cluster).ports
    assert ports is not None
    assert ports.dispatch[0, 0, 1, 0].reshape(2, 2).sum(axis=1).tolist() == [5, 5]
    assert ports.combine[0, 0, 1, 1].reshape(2, 2).sum(axis=1).tolist() == [2, 2]


def test_without_moves_its_baseline_is_that_of_placement_strategies(make_trace: MakeTrace) -> None:
    trace = make_trace(samples=64, tokens=7, unrouted=0.05)
    links = ("intra=100:2", "inter=10:5")
    options: dict[str, Any] = {"fit_fraction": 1.0, "samples_per_step": 16}
    ours = judged(solved(trace, links=links, **options).plan)["contiguous/standard"]
    request = Request(strategy="contiguous", trace=trace.path, cluster=Cluster.parse("2x2", links), **options)
    theirs = judged(make(request).plan)["contiguous/standard"]
    shared = set(ours) & set(theirs)
    assert {"device_copies", "node_copies", "inter_bytes", "intra_bytes", "balance", "dispatch_s", "combine_s"} < shared
    for name in shared:
        assert ours[name] == pytest.approx(theirs[name]), name
    assert ours["samples_moved"] == 0


@pytest.mark.parametrize("method", ["sum", "bottleneck", "paper"])
def test_exchanges_are_those_of_tokens_that_follow_their_samples(make_trace: MakeTrace, method: str) -> None:
    trace = make_trace(samples=16, tokens=6)
    cluster = Cluster(2, 2)
    roll = call_roll(trace)
    counted = count_samples(trace, roll, roll.tokens > 0, {"plan": contiguous.solve(3, 8, cluster).placement}, cluster)
    cohort = roll.cohort(np.arange(16), num_devices=4, samples_per_step=8)
    assert cohort.home is not None
    assert cohort.step is not None
    homes = rehome(
        method,
        counted.traffic["plan"],
        np.arange(16),
        cohort.home,
        cohort.step,
        cluster,
        predict=lambda *_: None,
        copy_bytes=None,
    )
    tally = tallied(roll, counted.traffic["plan"], np.arange(16), cohort, homes.device, cluster)
    assert tally.ports is not None
    copies, far, dispatch, combine = np.zeros(2), np.zeros(2), np.zeros((2, 3, 2, 2, 4)), np.zeros((2, 3, 2, 2, 4))
    for batch in trace.batches():
        assert batch.sample is not None
        for t in range(len(batch)):
            who = int(batch.sample[t]) // 7
            step = cohort.step[who]
            for layer in range(3):
                for device in {int(e) // 2 for e in batch.ids[t, layer]}:
                    for end, ports, leaves in (
                        (homes.device[layer, who], dispatch, 0),
                        (homes.device[layer + 1, who], combine, 1),
                    ):
                        if device != end:
                            link = int(device // 2 != end // 2)
                            copies[step] += 1
                            far[step] += link
                            ports[step, layer, link, leaves, end] += 1
                            ports[step, layer, link, 1 - leaves, device] += 1
    np.testing.assert_array_equal(tally.counts[:, 4], copies)
    np.testing.assert_array_equal(tally.counts[:, 6], far)
    np.testing.assert_array_equal(tally.ports.dispatch, dispatch)
    np.testing.assert_array_equal(tally.ports.combine, combine)
    assert all(np.bincount(at[cohort.step == s], minlength=4).max() == 2 for at in homes.device for s in (0, 1))


def test_prediction_closes_in_on_the_oracle_and_a_global_frequency_changes_nothing(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0)
    sample, paper = (judged(solved(trace, method=method).plan) for method in ("sum", "paper"))
    plan, oracle, none, base = (
        found["inter_bytes"]
        for found in (
            sample["plan/migrating"],
            sample["oracle/migrating"],
            paper["plan/migrating"],
            sample["contiguous/standard"],
        )
    )
    assert oracle <= plan < none < base
    assert plan - oracle < 0.1 * (none - oracle)
    traffic = Traffic.empty(contiguous.solve(1, 8, Cluster(2, 2)).placement, 16, Cluster(2, 2), linked=False)
    traffic.copies[:] = np.random.default_rng(0).integers(0, 50, traffic.copies.shape)
    who = np.arange(16)
    blind, frequent = (
        rehome("sum", traffic, who, who % 4, who * 0, Cluster(2, 2), predict=predict, copy_bytes=None).device
        for predict in (lambda *_: None, lambda *_: np.tile([9.0, 3.0, 1.0, 0.5], (16, 1)))
    )
    np.testing.assert_array_equal(blind, frequent)


def test_samples_that_are_all_alike_have_no_locality_and_no_benefit(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0)
    table = next(trace.tables())
    alike = CountTable(sample=table.sample, layer=table.layer, counts=np.full_like(table.counts, 64))
    write_counts(tmp_path / "alike", trace.meta, [alike])
    plan = solved(read_counts(tmp_path / "alike")).plan
    assert plan.verdict is not None
    assert (plan.verdict.value, plan.verdict.metric) == ("none", "inter_bytes")
    lines = list(sample_policy_lines(plan, part_of(plan)))
    assert "save more than 0.0%" in lines[0]
    assert "saved     0.0%" in lines[1]


def test_placement_and_homes_together_save_more_than_either_alone(tmp_path: Path, make_trace: MakeTrace) -> None:
    trace = make_trace(samples=128, tokens=8, layers=4, top_k=1, seed=3)
    cluster = Cluster.parse("2x2")
    base = Request(strategy="exflow", trace=trace.path, cluster=cluster, dispatch_model="standard", time_limit_s=5)
    make(base).save(tmp_path / "base.json")
    made = solved(trace, on=tmp_path / "base.json")
    found = judged(made.plan)
    assert list(found) == [
        "plan/migrating", "oracle/migrating", "base/standard", "contiguous/migrating", "contiguous/standard"
    ]  # fmt: skip
    copies = {label: metrics["inter_bytes"] for label, metrics in found.items()}
    assert copies["plan/migrating"] < min(copies["base/standard"], copies["contiguous/migrating"])
    assert made.plan.verdict is not None
    assert made.plan.verdict.against == "base/standard"
    assert made.plan.strategies == ("exflow", "netmoe")
    assert any(line.startswith("jointly") for line in sample_policy_lines(made.plan, part_of(made.plan)))
    certificate_of(made, trace, tmp_path)


@pytest.mark.parametrize(
    ("cluster", "columns", "options"),
    [
        ("2x2", ("sample",), {}),
        ("1x4", ("sample", "source_rank"), {}),
        ("4x1", ("sample", "step"), {"method": "paper"}),
        ("2x2", ("sample",), {"method": "bottleneck", "fit_fraction": 1.0}),
    ],
)
def test_a_plan_is_certified_by_code_of_its_own(
    make_trace: MakeTrace, tmp_path: Path, cluster: str, columns: tuple[str, ...], options: dict[str, Any]
) -> None:
    trace = make_trace(samples=70, tokens=5, columns=columns, ranks=4, unrouted=0.05)
    made = solved(trace, cluster, **options)
    certificate = certificate_of(made, trace, tmp_path)
    assert certificate.figures > 20
    assert certificate.largest_difference < 1e-9
    assert made.plan.verdict is not None
    assert made.plan.verdict.metric == ("device_copies" if cluster == "1x4" else "inter_bytes")


def test_a_plan_of_counts_with_a_profile_is_certified_with_its_seconds(
    make_profile: Callable[..., Path], tmp_path: Path
) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0, samples=120)
    profile = make_profile("2x2")
    made = solved(trace, profile=profile)
    assert "predicted seconds" in certificate_of(made, trace, tmp_path, profile).checks
    plan = judged(made.plan)["plan/migrating"]
    assert {"dispatch_s", "combine_s", "attention_s"} <= plan.keys()
    made = solved(trace)
    model = made.plan.model
    assert made.plan.inputs.trace is not None
    tables = np.concatenate([table.counts for table in trace.tables()]).reshape(120, 3, 8)
    assert made.plan.inputs.trace.num_tokens == (tables.sum(axis=2) // model.top_k).max(axis=1).sum()


def test_steps_without_attention_do_not_judge_and_hidden_seconds_are_refused(
    make_trace: MakeTrace, make_profile: Callable[..., Path], tmp_path: Path
) -> None:
    trace = make_trace(samples=70, tokens=5)
    profile = make_profile("2x2", cases=("all_to_all", "expert_ffn"))
    made = solved(trace, profile=profile)
    assert "step_s" in judged(made.plan)["plan/migrating"]
    assert made.plan.verdict is not None
    assert made.plan.verdict.metric == "inter_bytes"
    assert "predicted seconds" in certificate_of(made, trace, tmp_path, profile).checks
    with pytest.raises(CertificationError, match="verdict on step_s"):
        certify(changed(made.plan, ("verdict", "metric"), "step_s"))
    contender = ("evaluation", "held_out", "contenders", 0, "metrics")
    kept = {name: one for name, one in part_of(made.plan).contenders[0].metrics.items() if name != "step_s"}
    hidden = {name: one.model_dump(mode="json") for name, one in kept.items()}
    with pytest.raises(CertificationError, match="what times it gives"):
        certify(changed(made.plan, contender, hidden))


def changed(plan: Plan, path: tuple[str | int, ...], value: object) -> Plan:
    """The plan with one value changed, its hash made again."""
    written = plan.model_dump(mode="json", exclude={"plan_sha256", "moeplan_version", "created_at", "schema_version"})
    inside: Any = written
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    made = plan.model_dump(mode="json") | written
    made["plan_sha256"] = sha256_json({part: made[part] for part in ("decisions", "cluster", "model")})
    return parse(json.loads(json.dumps(made)), "changed")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("evaluation", "held_out", "contenders", 0, "metrics", "inter_bytes", "value"), 1.0, "inter_bytes"),
        (("evaluation", "held_out", "contenders", 0, "metrics", "samples_moved", "value"), 0.0, "samples_moved"),
        (("verdict", "gain", "low"), 1e9, "gain low"),
        (("verdict", "against"), "oracle/migrating", "verdict on"),
        (("options", "sample_policy", "least_copies"), 0.0, "least copies"),
        (("outcome", "sample_policy", "objective", "value"), 1e9, "objective"),
        (("decisions", "sample_policy", "method"), "magic", "expected sum"),
        (("decisions", "sample_policy", "predictor", "sha256"), "0" * 64, "another predictor"),
        (("decisions", "sample_policy", "layers"), [0, 1], "after every layer"),
    ],
)
def test_a_plan_that_claims_something_else_is_refused(
    make_trace: MakeTrace, tmp_path: Path, path: tuple[str | int, ...], value: object, message: str
) -> None:
    trace = make_trace(samples=70, tokens=5)
    made = solved(trace)
    made.save(tmp_path / "plan.json")
    plan = changed(made.plan, path, value)
    with pytest.raises(CertificationError, match=message):
        check_sample_policy(plan, trace, None, Certificate(), lambda _: None, folder=tmp_path)


def test_a_predictor_that_is_gone_or_was_fitted_on_others_is_refused(make_trace: MakeTrace, tmp_path: Path) -> None:
    trace = make_trace(samples=70, tokens=5)
    made, other = solved(trace), solved(trace, seed=1)
    check_sample_policy_structure(made.plan, Certificate())
    with pytest.raises(InputError, match="cannot be read as the plan's predictor"):
        check_sample_policy(made.plan, trace, None, Certificate(), lambda _: None, folder=tmp_path)
    assert made.plan.decisions.sample_policy is not None
    assert other.plan.decisions.sample_policy is not None
    theirs = other.plan.decisions.sample_policy.predictor
    assert theirs is not None
    other.save(tmp_path / "plan.json")
    plan = changed(made.plan, ("decisions", "sample_policy", "predictor"), theirs.model_dump())
    with pytest.raises(CertificationError, match="it was fitted on others"):
        check_sample_policy(plan, trace, None, Certificate(), lambda _: None, folder=tmp_path)


def test_the_same_request_gives_the_same_plan_and_file(make_trace: MakeTrace) -> None:
    trace = make_trace(samples=70)
    one, two = solved(trace), solved(trace)
    assert one.plan.plan_sha256 == two.plan.plan_sha256
    assert one.plan.evaluation == two.plan.evaluation
    assert one.sidecars == two.sidecars


def test_relabelling_the_devices_of_a_node_changes_no_figure(tmp_path: Path) -> None:
    trace = generated(tmp_path / "trace", alpha=3.0, samples=64)
    swapped = [2, 3, 0, 1, 4, 5, 6, 7]  # experts of devices 0 and 1 of node 0, two each
    tables = [
        CountTable(sample=t.sample, layer=t.layer, counts=np.ascontiguousarray(t.counts[:, swapped]))
        for t in trace.tables()
    ]
    write_counts(tmp_path / "swapped", trace.meta, tables)
    one, two = (judged(solved(t).plan) for t in (trace, read_counts(tmp_path / "swapped")))
    for label in ("plan/migrating", "oracle/migrating"):
        assert one[label]["inter_bytes"] == pytest.approx(two[label]["inter_bytes"], rel=2e-3)  # the fit's rounding


def test_gpt_oss_saves_something_and_says_so(gpt_oss: Path, tmp_path: Path) -> None:
    import_trace(gpt_oss, tmp_path / "trace", hidden_size=2880, dtype_bytes=2)
    found = judged(solved(open_any(tmp_path / "trace"), "2x4").plan)
    base, plan, oracle = (
        found[label]["inter_bytes"] for label in ("contiguous/standard", "plan/migrating", "oracle/migrating")
    )
    assert 1 - plan / base == pytest.approx(0.064, abs=0.01)
    assert 1 - oracle / base == pytest.approx(0.071, abs=0.01)
    shutil.rmtree(tmp_path / "trace")


def test_a_cluster_that_the_placement_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(MoeplanError, match="counts do not say") as caught:
        solved(generated(tmp_path / "trace", alpha=3.0, samples=20), "1x3")
    assert "\n" not in str(caught.value)
