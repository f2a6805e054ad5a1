"""Plans side by side on counts, by their loads; engines' replica rules; what moves from the plan in force."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.errors import CertificationError, InputError, UsageError
from moeplan.planner.certify import certify
from moeplan.planner.compare import Comparison, compare
from moeplan.planner.figures import megabytes
from moeplan.planner.report.compare import as_dict, compare_report, write_comparison
from moeplan.planner.report.remarks import rule_words
from moeplan.planner.report.traffic import traffic_section
from moeplan.solvers.replicas import ReplayRule, ReplicaTable
from moeplan.traces.schema import PHASES
from moeplan.traces.split import fitted
from tests.builders import known
from tests.oracles.splits import split_ratios
from tests.planner.makers import (
    balances,
    counted,
    edited,
    held_out,
    pictures_in,
    planned,
    rewritten,
    screen,
    stored,
    tallied,
)

RULES: tuple[ReplayRule, ...] = ("even", "quota", "lp")


def figure(comparison: Comparison, name: str, metric: str) -> float:
    return next(one.metrics[metric].value for one in comparison.part.contenders if one.name.endswith(name))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def test_on_its_own_counts_a_plan_is_judged_on_the_steps_that_it_has_not_seen(tmp_path: Path, path: Path) -> None:
    trace, loads = tallied(tmp_path / "t")
    plan = planned(trace, "eplb", redundant=4, to=path)
    comparison = compare([path], trace.path)
    assert comparison.num_fitted == plan.evaluation.fit.num_samples
    expected = balances(plan, held_out(loads)).mean()
    assert figure(comparison, "plan.json", "balance") == pytest.approx(expected, rel=1e-12)
    assert comparison.compared[0].verdict.gain == plan.verdict.gain
    json.dumps(as_dict(comparison), allow_nan=False)


def test_on_new_counts_placements_of_any_strategy_are_judged_by_their_balance(make_trace: Any, tmp_path: Path) -> None:
    trace, paths = make_trace(samples=60, seed=2), [tmp_path / "exflow.json", tmp_path / "eplb.json"]
    planned(trace, dispatch_model="standard", to=paths[0])
    planned(trace, "eplb", redundant=4, to=paths[1])
    other = make_trace(samples=64, seed=3, columns=("sample", "step"))
    on_tokens, on_counts = (compare(paths, one.path) for one in (other, counted(other, tmp_path / "counts")))
    assert {one.verdict.metric for one in on_counts.compared} == {"balance"}
    assert on_counts.part.num_tokens == on_tokens.part.num_tokens
    assert figure(on_counts, "exflow.json", "balance") == figure(on_tokens, "exflow.json", "balance")
    evened = figure(on_tokens, "eplb.json", "balance")  # tokens in turn against exact shares
    assert figure(on_counts, "eplb.json", "balance") == pytest.approx(evened, rel=0.1)


def test_what_counts_do_not_say_is_one_clear_refusal(make_trace: Any, tmp_path: Path, path: Path) -> None:
    trace, loads = tallied(tmp_path / "t")
    planned(trace, "eplb", redundant=4, to=path)
    for rule in ("static", "round_robin", "nearest"):
        with pytest.raises(UsageError, match=f"--replica-rule {rule} goes by where tokens come from"):
            compare([path], trace.path, replica_rule=rule)
    assert compare([path], trace.path, replica_rule="even").part == compare([path], trace.path).part
    assert compare([path], trace.path, keep=True).between == {}
    seen = fitted(np.arange(len(loads)), seed=0, fraction=0.5)
    with pytest.raises(InputError, match="no token is routed"):
        compare([path], stored(tmp_path / "u", 0 * loads).path)
    with pytest.raises(InputError, match="no token is routed"):
        planned(stored(tmp_path / "v", loads * seen[:, None, None]), "eplb")
    tokens = make_trace(samples=40)
    planned(tokens, redundant=4, dispatch_model="standard", to=tmp_path / "nearest.json")
    with pytest.raises(UsageError, match="depends on where it is"):
        compare([tmp_path / "nearest.json"], counted(tokens, tmp_path / "counts").path)
    planned(tokens, "netmoe", to=path)
    with pytest.raises(UsageError, match="moves samples and has its own"):
        compare([path], tokens.path, replica_rule="even")


def cells(trace: Any) -> set[tuple[int, int]]:
    """Every sample in every step of it."""
    return {cell for batch in trace.batches() for cell in zip(batch.step.tolist(), batch.sample.tolist(), strict=True)}


def is_fitted(unit: int) -> bool:
    return bool(fitted(np.array([unit]), seed=0, fraction=0.5)[0])


def test_each_plan_leaves_out_the_units_that_it_was_split_by(make_trace: Any, tmp_path: Path) -> None:
    tokens = make_trace(samples=60, seed=2, columns=("sample", "step"))
    trace, paths = counted(tokens, tmp_path / "counts"), [tmp_path / "eplb.json", tmp_path / "netmoe.json"]
    assert planned(trace, "eplb", to=paths[0]).options["evaluation"]["unit"] == "step"
    planned(trace, "netmoe", to=paths[1])
    steps = {step for step, _ in cells(tokens)}
    assert compare(paths, trace.path).part.num_steps == sum(not is_fitted(step) for step in steps)


def test_a_plan_of_one_phase_leaves_out_the_same_units_of_all(make_trace: Any, tmp_path: Path, path: Path) -> None:
    def later(batch: Any) -> Any:
        """Prefill in the step recorded, and decode, every other token, in a later one."""
        late = batch.position % 2 == 1
        phase = np.where(late, PHASES.index("decode"), PHASES.index("prefill")).astype(np.int8)
        return {"phase": phase, "step": np.where(late, batch.step + 100, batch.step).astype(np.int32)}

    trace = rewritten(make_trace(samples=70, seed=2, columns=("sample", "step")), tmp_path / "t", later)
    plan = planned(trace, "netmoe", phases=("prefill",), to=path)
    assert plan.options["evaluation"]["unit"] == "step"
    comparison = compare([path], trace.path)
    assert comparison.num_fitted == sum(is_fitted(step) for step, _ in cells(trace))
    assert comparison.num_fitted != sum(is_fitted(sample) for _, sample in cells(trace))


@pytest.mark.parametrize("rule", ["even", "nearest", "static", "round_robin"])
def test_a_rule_replays_what_an_engine_does_with_every_token(make_trace: Any, path: Path, rule: Any) -> None:
    """Samples of ids 0, 7, 14, ... in one whole step, each at home on its ordinal mod 4."""
    plan = planned(make_trace(samples=40), "eplb", redundant=8, to=path)
    trace, between = make_trace(samples=16, tokens=6, seed=9), np.zeros((4, 4), np.int64)
    comparison = compare([path], trace.path, replica_rule=rule, keep=True)
    (batch,) = trace.batches()
    home_T = batch.sample // 7 % 4
    for layer in range(3):
        table = ReplicaTable.of(plan.placement, layer, 2, rule)
        device_TK = table.choose(batch.ids[:, layer], home_T, batch.sample + batch.position)
        for home, devices in zip(home_T.tolist(), device_TK.tolist(), strict=True):
            between[home, [*{*devices} - {home}]] += 1
    between += between.T
    assert figure(comparison, "plan.json", "device_copies") == pytest.approx(between.sum() / len(batch) / 3, rel=1e-12)
    np.testing.assert_array_equal(comparison.between[f"{path}/standard"], between)
    assert as_dict(comparison)["replica_rule"] == rule


@pytest.mark.parametrize(("own", "engine"), [("even", "static"), ("nearest", "round_robin"), ("nearest", "even")])
def test_a_plan_is_replayed_by_the_rule_of_the_engine_that_it_was_judged_for(
    make_trace: Any, path: Path, own: Any, engine: Any
) -> None:
    trace = make_trace(samples=40)
    plan = planned(trace, "eplb", redundant=8, replica_rule=own, engine_rule=engine, to=path)
    unasked, by_own, by_engine = (
        figure(compare([path], trace.path, replica_rule=rule), "plan.json", "device_copies")
        for rule in (None, own, engine)
    )
    assert plan.evaluation.judging.contenders[0].metrics["device_copies"].value == unasked == by_engine != by_own
    assert certify(plan, trace.path, None, folder=path.parent).replayed
    with pytest.raises(CertificationError, match=r"copies|balance|hops"):
        certify(edited(plan, "options/evaluation/engine_rule", None), trace.path, None, folder=path.parent)
    rival, own_rival = (
        figure(compare([path], trace.path, replica_rule=rule), "contiguous in 16 slots", "device_copies")
        for rule in (engine, own)
    )
    stated = {one.name: one.metrics["device_copies"].value for one in plan.evaluation.judging.contenders}
    assert stated["contiguous in 16 slots"] == rival != own_rival
    plain = planned(trace, "eplb", redundant=8, replica_rule=own)
    eplb = next(one for one in plain.evaluation.judging.contenders if one.name == "eplb")
    assert (stated["eplb"] == eplb.metrics["device_copies"].value) == (engine == "even"), "published EPLB is even"
    assert f"plan.json: {rule_words(engine)}" in screen(compare_report, compare([path], trace.path))


def test_a_plan_whose_steps_are_split_keeps_its_rule_with_an_engine_that_can(make_trace: Any, path: Path) -> None:
    trace = make_trace(samples=40)
    plain, served = (
        planned(trace, "eplb", redundant=8, replica_rule="lp", engine_rule=engine, to=path)
        for engine in (None, "static")
    )
    ours, theirs = (plan.evaluation.judging.contenders[0].metrics for plan in (plain, served))
    assert ours == theirs
    assert figure(compare([path], trace.path), "plan.json", "device_copies") == ours["device_copies"].value


def test_on_counts_an_engine_s_rule_is_left_out(make_trace: Any, tmp_path: Path, path: Path) -> None:
    trace = make_trace(samples=40)
    counts = counted(trace, tmp_path / "counts")
    for engine in (None, "static"):
        planned(trace, "eplb", redundant=8, engine_rule=engine, to=path)
        loads = figure(compare([path], counts.path), "plan.json", "balance")
        even = figure(compare([path], counts.path, replica_rule="even"), "plan.json", "balance")
        assert loads == even
    assert planned(counts, "eplb", redundant=8, engine_rule="static").options["evaluation"]["engine_rule"] is None


def test_slots_alone_have_the_rules_of_the_plans_that_they_stand_beside(make_trace: Any, tmp_path: Path) -> None:
    trace, paths = make_trace(samples=40), [tmp_path / f"{rule}.json" for rule in ("even", "nearest")]
    for path in paths:
        planned(trace, "eplb", redundant=8, replica_rule=path.stem, to=path)
    alone = [figure(compare([path], trace.path), "contiguous in 16 slots", "device_copies") for path in paths]
    both = compare(paths, trace.path)
    assert alone == [figure(both, f"in 16 slots, {path.stem}", "device_copies") for path in paths]
    assert alone[0] != alone[1]
    alike = compare(paths, trace.path, replica_rule="nearest")
    assert figure(alike, "contiguous in 16 slots", "device_copies") == alone[1]


@pytest.mark.parametrize("rule", ["quota", "lp"])
def test_the_exact_split_has_the_loads_of_a_linear_programme_on_tokens_and_on_counts(
    make_trace: Any, tmp_path: Path, path: Path, rule: Any
) -> None:
    plan = planned(make_trace(samples=40), "eplb", redundant=4, to=path)
    trace = make_trace(samples=12, tokens=6, seed=9, columns=("sample", "step"))
    on_tokens, on_counts = (
        compare([path], one.path, replica_rule=rule) for one in (trace, counted(trace, tmp_path / "counts"))
    )
    loads = np.zeros((1000, 3, 8), np.int64)
    for batch in trace.batches():
        for layer in range(3):
            np.add.at(loads[:, layer], (batch.step[:, None], batch.ids[:, layer]), 1)
    held_LED = np.stack([plan.placement.holds(layer) for layer in range(3)])
    ratios = split_ratios(held_LED, loads[loads.any(axis=(1, 2))])
    for comparison in (on_tokens, on_counts):
        assert figure(comparison, "plan.json", "balance") == pytest.approx(np.mean(ratios), rel=1e-12)
    (bounds,) = on_counts.bounds.values()
    assert [one.split for one in bounds] == pytest.approx(ratios.mean(axis=0).tolist())
    assert bounds == next(iter(on_tokens.bounds.values()))
    assert not compare([path], trace.path).bounds
    assert "the 3 least even of 3 layers" in screen(compare_report, on_counts, verbose=True)
    sent = {one: figure(compare([path], trace.path, replica_rule=one), "plan.json", "device_copies") for one in RULES}
    assert sent["quota"] < min(sent["lp"], sent["even"])


def test_the_exact_split_needs_tokens_that_return_home(make_trace: Any, tmp_path: Path) -> None:
    trace = make_trace(samples=40)
    planned(trace, redundant=4, to=tmp_path / "coherent.json")
    with pytest.raises(UsageError, match="whose tokens do not return home"):
        compare([tmp_path / "coherent.json"], trace.path, replica_rule="lp")


def test_experts_that_move_from_the_first_plan_are_counted_with_their_bytes(make_trace: Any, tmp_path: Path) -> None:
    trace, paths = make_trace(samples=60), [tmp_path / f"{seed}.json" for seed in (0, 1, 2)]
    old, new, _ = (
        planned(trace, "eplb", seed=seed % 2, redundant=4 * (seed % 2), to=path).placement
        for seed, path in enumerate(paths)
    )
    first, *others = (one.moves for one in compare(paths, trace.path).compared)
    assert first is None
    moves, same = map(known, others)
    places = [(layer, device) for layer in range(new.num_layers) for device in range(4)]
    expected = sum(len({*new.held(*place)} - {*old.held(*place)}) for place in places)
    assert (moves.experts, moves.held) == (expected, new.num_slots * new.num_layers)
    assert moves.num_bytes == expected * 3 * 96 * trace.model.copy_bytes
    assert same.experts == 0


def test_the_page_shows_the_bytes_and_the_balance_that_the_screen_shows(
    make_trace: Any, tmp_path: Path, path: Path
) -> None:
    trace = make_trace(samples=64)
    planned(trace, "eplb", redundant=4, to=path)
    comparison = compare([path], trace.path, keep=True)
    write_comparison(comparison, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    part, today, ours = comparison.part, "contiguous/standard", f"{path}/standard"
    section = known(traffic_section(part, comparison.tallies, [today, ours], today, comparison.cluster))
    heats = dict(zip((today, ours), pictures_in(section), strict=True))
    for one in part.contenders[:2]:
        far, near = (one.metrics[name].value for name in ("inter_bytes", "intra_bytes"))
        table = heats[one.label].table * 1e6
        assert table[:2, 2:].sum() + table[2:, :2].sum() == pytest.approx(far)
        assert table.sum() == pytest.approx(far + near)
        copies = comparison.between[one.label]
        np.testing.assert_allclose(table[:2, 2:] / table[:2, 2:].sum(), copies[:2, 2:] / copies[:2, 2:].sum())
        assert f">{megabytes(far)}<" in page
        assert f": balance {one.metrics['balance'].value:.2f}<" in page
