"""PipeMoE in the planner: degrees and seconds of whole traces against an event simulation walked in Python."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeplan.errors import InputError, UsageError
from moeplan.planner.cut import Cut
from moeplan.planner.options import PipelineOptions
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.profile import load
from moeplan.runtime.plan import Plan, save
from moeplan.solvers.pipemoe import simulate
from moeplan.traces.reader import open_trace
from moeplan.traces.schema import PHASES, TraceMeta
from moeplan.traces.writer import TraceWriter
from tests.planner.edits import edited


def make_plan(trace: Any, by: Path, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"strategy": "pipemoe", "trace": str(trace.path), "cluster": load(by).cluster}
    return solve(Request(**settings | {"profile": by} | changes))


def placed(trace: Any, profile: Path, path: Path, **changes: Any) -> Path:
    """A base: experts placed by eplb."""
    save(make_plan(trace, profile, **{"strategy": "eplb"} | changes), path)
    return path


def training(trace: Any, folder: Path) -> Any:
    """The trace with every token in training."""
    with TraceWriter(folder, TraceMeta(form="tokens", model=trace.model, recorder="test")) as writer:
        for batch in trace.batches():
            writer.append(replace(batch, phase=np.full(len(batch), PHASES.index("train"), np.int8)))
    return open_trace(folder)


def options(plan: Plan) -> PipelineOptions:
    return PipelineOptions.model_validate(dict(plan.options["pipeline"]))


def seconds(plan: Plan, label: str, metric: str) -> float:
    assert plan.evaluation is not None
    return next(one for one in plan.evaluation.fit.contenders if one.label == label).metrics[metric].value


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("full_duplex", [False, True])
@pytest.mark.parametrize("slow", [False, True])
def test_the_degrees_are_those_of_a_search_by_simulation_under_the_formulas_behind_the_profile(
    make_trace: Any, make_profile: Any, tmp_path: Path, trains: bool, full_duplex: bool, slow: bool
) -> None:
    trace, profile = make_trace(samples=16, tokens=200, layers=2), make_profile("1x2", noise=0.0)
    trace = training(trace, tmp_path) if trains else trace
    changes: dict[str, Any] = {"fit_fraction": 1.0, "max_degree": 12, "full_duplex": full_duplex}
    if slow:  # exchanges take longer than experts
        profile = make_profile("1x2", noise=0.0, cases=("expert_ffn", "attention"))
        changes["cluster"] = Cluster.parse("1x2", ["intra=0.05:20"])
    plan = make_plan(trace, profile, **changes)
    work, s_per_byte = busiest(trace), 2e-8 if slow else 1e-9

    def mean(degree: int, factor: float) -> Any:
        return simulated(work, degree, factor, s_per_byte, full_duplex).mean(axis=0)

    taken = {
        back: np.array([mean(r, 2.0 if back else 1.0) for r in range(1, 13)])
        for back in ([False, True] if trains else [False])
    }
    decision = plan.decisions.pipeline
    assert decision is not None
    for back, degrees in ((False, decision.forward), (True, decision.backward)):
        if degrees is None:
            assert not trains
            continue
        chosen = taken[back][np.array(degrees) - 1, [0, 1]]
        assert chosen == pytest.approx(taken[back].min(axis=0), rel=0.01)
        name = "moe_backward_s" if back else "moe_s"
        assert seconds(plan, "plan/standard", name) == pytest.approx(chosen.sum(), rel=0.02)
        assert seconds(plan, "degree_1/standard", name) == pytest.approx(taken[back][0].sum(), rel=0.02)
    assert plan.outcome["pipeline"].status == "optimal"
    assert max(decision.forward) > 1
    if slow and not full_duplex:
        assert seconds(plan, "plan/standard", "moe_s") > seconds(plan, "plan/standard", "experts_s")


def busiest(trace: Any) -> list[list[tuple[int, int]]]:
    """Copies through the busiest port, pairs on the busiest device, by step and layer; sample i at home on i mod 2."""
    ids = np.concatenate([batch.ids for batch in trace.batches()])
    home, step = np.repeat(np.arange(16) % 2, 200), np.repeat(np.arange(16) // 8, 200)
    found = []
    for of in (0, 1):
        layers = []
        for layer in (0, 1):
            devices = ids[:, layer] // 4
            sent = [int(((step == of) & (home == d) & (devices == 1 - d).any(axis=1)).sum()) for d in (0, 1)]
            pairs = [int((devices[step == of] == d).sum()) for d in (0, 1)]
            layers.append((max(sent), max(pairs)))
        found.append(layers)
    return found


def simulated(
    work: list[list[tuple[int, int]]], degree: int, factor: float, s_per_byte: float, full_duplex: bool
) -> Any:
    def layer(copies: int, pairs: int) -> float:
        exchange = [20e-6 + s_per_byte * 128 * -(-copies // degree)] * degree
        experts = [factor * (40e-6 + 1e-10 * 3 * 64 * 96 * -(-pairs // degree))] * degree
        return simulate(exchange, experts, exchange, full_duplex=full_duplex)[-1].end_s

    return np.array([[layer(*cell) for cell in step] for step in work])


def test_the_fit_objective_is_what_the_evaluator_gives(make_trace: Any, make_profile: Any, tmp_path: Path) -> None:
    trace = training(make_trace(samples=40, tokens=60), tmp_path)
    for method in ("exact", "paper", "robust"):
        plan = make_plan(trace, make_profile("2x2"), method=method)
        found = sum(seconds(plan, "plan/standard", name) for name in ("moe_s", "moe_backward_s"))
        assert found == pytest.approx(plan.outcome["pipeline"].objective.value, rel=1e-12)


@pytest.mark.parametrize("method", ["paper", "robust"])
def test_no_method_beats_the_bound_and_the_exact_degrees_stand_beside_it(
    make_trace: Any, make_profile: Any, method: str
) -> None:
    trace, profile = make_trace(samples=40, tokens=120), make_profile()
    outcome, exact = (make_plan(trace, profile, method=m).outcome["pipeline"] for m in (method, "exact"))
    assert outcome.bound == exact.objective.value
    assert outcome.objective.value >= exact.objective.value
    plan = make_plan(trace, profile, method=method)
    assert seconds(plan, "exact/standard", "moe_s") == pytest.approx(exact.objective.value)
    assert method not in options(plan).baselines


def test_degree_1_takes_what_the_placement_takes_without_a_pipeline(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    trace, profile = make_trace(samples=40, tokens=60), make_profile("2x2")
    on = placed(trace, profile, tmp_path / "base.json", redundant=4)
    plan, base = make_plan(trace, profile, on=on), make_plan(trace, profile, strategy="eplb", redundant=4)
    for name in ("step_s", "dispatch_s", "dispatch_inter_s", "experts_s", "combine_s", "attention_s"):
        assert seconds(plan, "degree_1/standard", name) == pytest.approx(seconds(base, "plan/standard", name))


def test_a_joint_plan_has_one_degree_for_both_passes_which_is_what_tutel_takes(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    trace, profile = training(make_trace(samples=40, tokens=200), tmp_path), make_profile()
    apart, joint = (make_plan(trace, profile, joint=one) for one in (False, True))
    decision = joint.decisions.pipeline
    assert decision is not None
    assert decision.forward == decision.backward == options(joint).a2a_ffn_overlap_degree
    assert options(apart).a2a_ffn_overlap_degree == decision.forward
    assert joint.outcome["pipeline"].objective.value >= apart.outcome["pipeline"].objective.value
    assert joint.outcome["pipeline"].status == "optimal"


def test_tutel_never_gets_more_chunks_than_it_takes(make_trace: Any, make_profile: Any) -> None:
    trace, profile = make_trace(samples=16, tokens=400, layers=1), make_profile("1x2")
    free = load(profile)
    nothing = {
        key: series.model_copy(update={"fit": replace(fit, model=replace(fit.alpha_beta, a_s=0.0), least_s=None)})
        for key, series in free.series.items()
        if (fit := series.fit) is not None
    }
    path = profile.with_name("free.json")
    from moeplan.profilers.profile import save as save_profile

    save_profile(free.model_copy(update={"series": nothing}), path)
    plan = make_plan(trace, path, max_degree=64)
    decision = plan.decisions.pipeline
    assert decision is not None
    assert max(decision.forward) > 32
    assert max(options(plan).a2a_ffn_overlap_degree) <= 32


def test_the_decisions_of_the_base_are_kept_and_bound_by_its_hash(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    trace, profile = make_trace(samples=40), make_profile()
    on = placed(trace, profile, tmp_path / "base.json")
    base = make_plan(trace, profile, strategy="eplb")
    plan, other = make_plan(trace, profile, on=on), make_plan(trace, profile, on=on, seed=1)
    assert plan.strategies == ("eplb", "pipemoe")
    assert plan.decisions.placement == base.decisions.placement
    assert plan.plan_sha256 != base.plan_sha256
    assert plan.inputs.base is not None
    assert plan.options["placement"] == base.options["placement"]
    assert (set(plan.outcome), set(other.outcome)) == ({"placement", "pipeline"}, {"pipeline"})
    assert options(make_plan(trace, profile)).placement == "contiguous"


def test_on_a_balanced_placement_fewer_seconds_are_left_than_on_contiguous(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    """The busiest device's tokens decide, not the uniform count."""
    trace, profile = skewed(make_trace(samples=40, tokens=100), tmp_path / "skewed"), make_profile(noise=0.0)
    on = placed(trace, profile, tmp_path / "base.json", redundant=4)
    balanced, plain = make_plan(trace, profile, on=on), make_plan(trace, profile)
    assert balanced.outcome["pipeline"].objective.value < 0.9 * plain.outcome["pipeline"].objective.value


def skewed(trace: Any, folder: Path) -> Any:
    """Most first choices fall on experts 0 and 1."""
    with TraceWriter(folder, TraceMeta(form="tokens", model=trace.model, recorder="test")) as writer:
        for batch in trace.batches():
            ids = batch.ids.copy()
            ids[: len(ids) * 2 // 3] = [0, 1]
            writer.append(replace(batch, ids=ids))
    return open_trace(folder)


def test_a_step_is_attention_and_both_passes(make_trace: Any, make_profile: Any, tmp_path: Path) -> None:
    plan = make_plan(training(make_trace(samples=40), tmp_path), make_profile())
    parts = [seconds(plan, "plan/standard", name) for name in ("attention_s", "moe_s", "moe_backward_s")]
    assert seconds(plan, "plan/standard", "step_s") == pytest.approx(sum(parts))
    busy = [seconds(plan, "plan/standard", name) for name in ("dispatch_s", "experts_s", "combine_s")]
    assert max(busy[0] + busy[2], busy[1]) <= parts[1] <= sum(busy)
    assert plan.verdict is not None
    assert (plan.verdict.metric, plan.verdict.against) == ("step_s", "degree_1/standard")


def test_where_experts_and_exchanges_are_long_alike_a_benefit_is_expected(make_trace: Any, make_profile: Any) -> None:
    plan = make_plan(make_trace(samples=300, tokens=300), make_profile(noise=0.01), samples_per_step=32)
    assert plan.verdict is not None
    assert plan.verdict.value == "benefit"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"profile": None}, "no profile"),
        ({"profile": None, "cluster": Cluster.parse("1x4", ["intra=10:5"])}, "no profile"),
        ({"max_degree": 0}, "--max-degree 0"),
        ({"max_degree": 10**9}, "--max-degree"),
        ({"method": "ilp"}, "exact or paper or robust"),
        ({"dispatch_model": "coherent"}, "--dispatch coherent"),
        ({"slots": 4}, "--slots"),
        ({"method": "unequal", "joint": True}, "--joint with --method unequal"),
        ({"capacity_factor": 0.0}, "--capacity-factor 0.0"),
        ({"capacity_factor": float("nan")}, "--capacity-factor nan"),
        ({"capacity_factor": 1e9}, "--capacity-factor"),
        ({"strategy": "eplb", "capacity_factor": 1.0}, "only pipemoe"),
        ({"strategy": "eplb", "joint": True}, "only pipemoe"),
        ({"strategy": "eplb", "method": "paper"}, "one way only"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_refused_by_name(
    make_trace: Any, make_profile: Any, changes: Any, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        make_plan(make_trace(), make_profile(), **changes)


def test_a_profile_that_cannot_time_the_experts_is_refused_by_name(make_trace: Any, make_profile: Any) -> None:
    with pytest.raises(InputError, match="no seconds of experts"):
        make_plan(make_trace(samples=40), make_profile(cases=("all_to_all",)))


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        ({"strategy": "exflow"}, {}, "coherent dispatch"),
        ({"strategy": "pipemoe"}, {}, "pipeline, not again"),
        ({"strategy": "eplb"}, {"strategy": "eplb"}, "leave --on away"),
        ({"strategy": "pipemoe"}, {"strategy": "exflow"}, "not beside pipeline"),
        ({"strategy": "eplb"}, {"cluster": Cluster.parse("2x2")}, "leave --cluster away"),
    ],
    ids=str,
)
def test_decisions_that_do_not_go_together_are_refused_by_name(
    make_trace: Any, make_profile: Any, tmp_path: Path, base: Any, changes: Any, words: str
) -> None:
    trace, profile = make_trace(samples=40), make_profile()
    on = placed(trace, profile, tmp_path / "base.json", **base)
    with pytest.raises(UsageError, match=words):
        make_plan(trace, profile, on=on, **changes)


def test_a_base_of_another_model_is_refused(make_trace: Any, make_profile: Any, tmp_path: Path) -> None:
    profile = make_profile()
    on = placed(make_trace(samples=40), profile, tmp_path / "base.json")
    with pytest.raises(InputError, match="same model"):
        make_plan(make_trace(samples=40, layers=4), profile, on=on)


@pytest.mark.parametrize("cluster", ["1x4", "2x2"])
def test_under_a_fixed_capacity_every_chunk_is_of_whole_padded_rows_whatever_is_routed_where(
    make_trace: Any, make_profile: Any, cluster: str
) -> None:
    """Rows of an expert from a device as Tutel counts them; all of them are sent and computed in every chunk."""
    trace, profile = make_trace(samples=16, tokens=75, layers=2), make_profile(cluster, noise=0.0)
    plan = make_plan(trace, profile, fit_fraction=1.0, max_degree=6, capacity_factor=1.3)
    group = int(cluster[2])
    rows = 2 * int(1.3 * -(-(4 * 75) // 8))  # top-2, 4 samples a device, 8 experts

    def taken(degree: int) -> float:
        chunk = -(-rows // degree)
        exchange = max(
            (20e-6 + 1e-9 * scale * 128 * 2 * peers * chunk)
            for peers, scale in ((group - 1, 1), (4 - group, 6))  # slower by 4, for 3 of 4 parts where 2 cross
            if peers
        )
        experts = 40e-6 + 1e-10 * 3 * 64 * 96 * 2 * 4 * chunk
        return simulate([exchange] * degree, [experts] * degree, [exchange] * degree)[-1].end_s

    found, table = plan.decisions.pipeline, [taken(degree) for degree in range(1, 7)]
    assert found is not None
    for degree in found.forward:
        assert table[degree - 1] == pytest.approx(min(table), rel=0.01)
    assert seconds(plan, "plan/standard", "moe_s") == pytest.approx(2 * min(table), rel=0.02)
    assert seconds(plan, "degree_1/standard", "moe_s") == pytest.approx(2 * table[0], rel=0.02)
    assert options(plan).a2a_ffn_overlap_degree == found.forward


def test_a_fixed_capacity_needs_every_expert_once(make_trace: Any, make_profile: Any, tmp_path: Path) -> None:
    trace, profile = make_trace(samples=40), make_profile()
    on = placed(trace, profile, tmp_path / "base.json", redundant=4)
    with pytest.raises(UsageError, match="12 slots for 8 experts"):
        make_plan(trace, profile, on=on, capacity_factor=1.25)


def test_unequal_chunks_help_where_experts_take_long_and_never_take_longer_than_equal_ones(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    profile = make_profile("1x2", noise=0.0)
    for trains in (False, True):
        trace = make_trace(samples=32, tokens=400)
        trace = training(trace, tmp_path) if trains else trace
        plan, equal = (
            make_plan(trace, profile, method=method, fit_fraction=1.0, max_degree=8) for method in ("unequal", "exact")
        )
        shares, decision = options(plan).shares, plan.decisions.pipeline
        assert shares is not None
        assert decision is not None
        assert [*map(len, shares.forward)] == [*decision.forward]
        assert (shares.backward is None) == (decision.backward is None) == (not trains)
        assert any(len(set(one)) > 1 for one in shares.forward)
        value = sum(seconds(plan, "plan/standard", name) for name in ["moe_s"] + ["moe_backward_s"] * trains)
        assert value == pytest.approx(plan.outcome["pipeline"].objective.value, rel=1e-12)
        assert value < 0.995 * equal.outcome["pipeline"].objective.value
        assert seconds(plan, "exact/standard", "moe_s") == seconds(equal, "plan/standard", "moe_s")
        assert plan.outcome["pipeline"].bound is None


def test_equal_shares_take_what_equal_degrees_take() -> None:
    rows = np.arange(1, 2000)[None, :, None] * np.ones((1, 1, 3), np.int64)
    for degree in (1, 2, 3, 7, 32, 49):
        equal = Cut.equal(degree, 1999).sizes(rows)[0]
        for part in Cut.of(((1 / degree,) * degree,) * 1999).sizes(rows):
            assert (part == equal).all()


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.sampled_from(["exact", "robust", "unequal"]))
def test_other_names_for_experts_or_for_devices_change_no_degree_and_no_figure(
    make_trace: Any, make_profile: Any, tmp_path_factory: Any, random: Any, method: str
) -> None:
    """Devices move with their node; the base's slots, the homes of samples and the experts follow."""
    folder = tmp_path_factory.mktemp("relabelled")
    profile, plain = make_profile("2x2"), make_trace(samples=16, tokens=40)
    nodes = random.sample([[0, 1], [2, 3]], 2)
    device = np.array([one for node in nodes for one in random.sample(node, 2)])  # the new one of each old
    expert = np.array(random.sample(range(8), 8))
    here = np.array([int(sample) % 4 for batch in plain.batches() for sample in batch.sample])
    plans = []
    for name, to_expert, to_device in (("old", np.arange(8), np.arange(4)), ("new", expert, device)):
        trace, start = folder / name, 0
        with TraceWriter(trace, TraceMeta(form="tokens", model=plain.model, recorder="test")) as writer:
            for batch in plain.batches():
                home = to_device[here[start : start + len(batch)]].astype(np.int32)
                start += len(batch)
                writer.append(replace(batch, ids=to_expert[batch.ids].astype(batch.ids.dtype), source_rank=home))
        base = make_plan(open_trace(trace), profile, strategy="contiguous", dispatch_model="standard")
        slots = np.empty((plain.model.num_layers, 4, 2), np.int64)
        for number in range(8):
            slots[:, to_device[number // 2], number % 2] = to_expert[number]
        rows = np.sort(slots, axis=2).reshape(len(slots), 8).tolist()
        on = folder / f"{name}.json"
        save(edited(base, "decisions/placement/physical_to_logical", rows, hashed=True), on)
        plans.append(make_plan(open_trace(trace), profile, on=on, method=method, max_degree=8))
    old, new = plans
    assert old.decisions.pipeline == new.decisions.pipeline
    assert options(old) == options(new)
    assert old.evaluation == new.evaluation
    assert old.verdict == new.verdict


def test_a_larger_limit_never_hurts_and_the_bound_is_never_beaten(make_trace: Any, make_profile: Any) -> None:
    trace, profile = make_trace(samples=24, tokens=200), make_profile("2x2", noise=0.2)
    before = np.inf
    for limit in (1, 2, 3, 5, 8, 13):
        values = {}
        for method in ("exact", "paper", "robust"):
            outcome = make_plan(trace, profile, method=method, max_degree=limit).outcome["pipeline"]
            values[method] = outcome.objective.value
            assert outcome.bound is not None
            assert outcome.objective.value >= outcome.bound == values["exact"]
        assert values["exact"] <= before
        before = values["exact"]
