"""Plans side by side on counts, by their loads; engines' replica rules; what moves from the plan in force."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.errors import InputError, UsageError
from moeplan.planner.compare import Comparison, compare
from moeplan.planner.report.compare import as_dict, write_matrices
from moeplan.planner.request import Request
from moeplan.planner.solve import make
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import load
from moeplan.traces.count_form import tabulate, write_counts
from moeplan.traces.reader import Trace
from moeplan.traces.split import fitted
from tests.planner.makers import balances, held_out, stored, tallied


def planned(trace: Any, path: Path, **changes: Any) -> Path:
    settings: dict[str, Any] = {"strategy": "eplb", "trace": str(trace.path), "cluster": Cluster.parse("2x2")}
    make(Request.of(**settings | changes)).save(path)
    return path


def figure(found: Comparison, name: str, metric: str) -> float:
    return next(dict(one.metrics)[metric].value for one in found.part.contenders if one.name.endswith(name))


def test_on_its_own_counts_a_plan_is_judged_on_the_steps_that_it_has_not_seen(tmp_path: Path) -> None:
    trace, counts = tallied(tmp_path / "t")
    path = planned(trace, tmp_path / "plan.json", redundant=4)
    found, plan = compare([path], trace.path), load(path)
    assert plan.evaluation is not None
    assert plan.verdict is not None
    assert found.num_fitted == plan.evaluation.fit.num_samples
    assert figure(found, "plan.json", "balance") == pytest.approx(balances(plan, held_out(counts)).mean(), rel=1e-12)
    assert found.compared[0].verdict.gain == plan.verdict.gain
    assert found.failing == []
    json.dumps(as_dict(found), allow_nan=False)


def test_on_new_counts_placements_of_any_strategy_are_judged_by_their_balance(make_trace: Any, tmp_path: Path) -> None:
    tokens = make_trace(samples=60, seed=2)
    paths = [
        planned(tokens, tmp_path / "exflow.json", strategy="exflow", dispatch_model="standard"),
        planned(tokens, tmp_path / "eplb.json", redundant=4),
    ]
    other = make_trace(samples=64, seed=3, columns=("sample", "step"))
    write_counts(tmp_path / "counts", other.meta.model_copy(update={"form": "counts"}), tabulate(other))
    on_tokens, on_counts = (compare(paths, one) for one in (other.path, tmp_path / "counts"))
    assert {one.verdict.metric for one in on_counts.compared} == {"balance"}
    assert on_counts.part.num_tokens == on_tokens.part.num_tokens
    assert figure(on_counts, "exflow.json", "balance") == figure(on_tokens, "exflow.json", "balance")
    evened = figure(on_tokens, "eplb.json", "balance")  # tokens in turn against exact shares
    assert figure(on_counts, "eplb.json", "balance") == pytest.approx(evened, rel=0.1)


def test_counts_of_nothing_judge_no_plan(tmp_path: Path) -> None:
    trace, counts = tallied(tmp_path / "t")
    path = planned(trace, tmp_path / "plan.json")
    with pytest.raises(InputError, match="no token is routed"):
        compare([path], stored(tmp_path / "u", 0 * counts).path)
    seen = fitted(np.arange(len(counts)), seed=0, fraction=0.5)
    with pytest.raises(InputError, match="no token is routed"):
        planned(stored(tmp_path / "v", counts * seen[:, None, None]), tmp_path / "next.json")


def test_what_counts_do_not_say_is_one_clear_refusal(make_trace: Any, tmp_path: Path) -> None:
    trace, _ = tallied(tmp_path / "t")
    path = planned(trace, tmp_path / "plan.json", redundant=4)
    for rule in ("static", "round_robin", "nearest"):
        with pytest.raises(UsageError, match=f"--replica-rule {rule} goes by where tokens come from"):
            compare([path], trace.path, replica_rule=rule)
    assert compare([path], trace.path, replica_rule="even").part == compare([path], trace.path).part
    with pytest.raises(UsageError, match="counts do not say between which devices"):
        compare([path], trace.path, between=True)
    tokens = make_trace(samples=40)
    nearest = planned(tokens, tmp_path / "nearest.json", strategy="exflow", redundant=4, dispatch_model="standard")
    write_counts(tmp_path / "counts", tokens.meta.model_copy(update={"form": "counts"}), tabulate(tokens))
    with pytest.raises(UsageError, match="depends on where it is"):
        compare([nearest], tmp_path / "counts")


def walked(trace: Trace, plan: Any, rule: str) -> tuple[float, Any]:
    """Copies a token and layer, and by pair of devices, token by token; all of the trace is one step a 16 samples."""
    held = [plan.placement.holds(layer) for layer in range(plan.model.num_layers)]
    devices, group, num_tokens, copies = 4, 2, 0, np.zeros((4, 4), np.int64)
    order = sorted({int(one) for batch in trace.batches() for one in np.asarray(batch.sample)})
    for batch in trace.batches():
        assert batch.sample is not None
        for ids_LK, sample, position in zip(batch.ids, batch.sample.tolist(), batch.position.tolist(), strict=True):
            home, turn = order.index(sample) % devices, sample + position
            num_tokens += 1
            for layer, ids_K in enumerate(ids_LK):
                to = {
                    _chosen(np.flatnonzero(held[layer][e]).tolist(), home, turn, e, group, rule)
                    for e in ids_K.tolist()
                    if e < plan.model.num_experts
                }
                for device in to - {home}:
                    copies[home, device] += 1
                    copies[device, home] += 1
    return copies.sum() / num_tokens / plan.model.num_layers, copies


def _chosen(holders: list[int], home: int, turn: int, expert: int, group: int, rule: str) -> int:
    near = [one for one in holders if one // group == home // group]
    if rule == "round_robin":
        return holders[(turn + home) % len(holders)]
    if rule == "even":
        return holders[turn % len(holders)]
    if home in holders:
        return home
    offered = near or holders
    if rule == "nearest":
        return offered[turn % len(offered)]
    asking = [d for d in range(4) if d not in holders]
    alike = [d for d in asking if bool(near) == any(h // group == d // group for h in holders)]
    alike = [d for d in alike if d // group == home // group] if near else alike
    return offered[(alike.index(home) + expert) % len(offered)]


@pytest.mark.parametrize("rule", ["even", "nearest", "static", "round_robin"])
def test_a_rule_replays_what_an_engine_does_with_every_token(make_trace: Any, tmp_path: Path, rule: Any) -> None:
    path = planned(make_trace(samples=40), tmp_path / "plan.json", redundant=8)
    trace = make_trace(samples=16, tokens=6, seed=9)  # one whole step
    found = compare([path], trace.path, replica_rule=rule, between=True)
    copies, between = walked(trace, load(path), rule)
    assert figure(found, "plan.json", "device_copies") == pytest.approx(copies, rel=1e-12)
    np.testing.assert_array_equal(found.between[f"{path}/standard"], between)
    assert as_dict(found)["replica_rule"] == rule


def test_rules_are_not_for_plans_that_move_samples(make_trace: Any, tmp_path: Path) -> None:
    trace = make_trace(samples=64)
    path = planned(trace, tmp_path / "moving.json", strategy="netmoe")
    with pytest.raises(UsageError, match="moves samples and has its own"):
        compare([path], trace.path, replica_rule="even")


@pytest.mark.parametrize("strategy", ["exflow", "netmoe"])
def test_copies_between_devices_add_up_to_those_of_the_table(make_trace: Any, tmp_path: Path, strategy: str) -> None:
    trace = make_trace(samples=64, tokens=10)
    path = planned(trace, tmp_path / "plan.json", strategy=strategy)
    found = compare([path], trace.path, between=True)
    model = trace.model
    for one in found.part.contenders:
        matrix, metrics = found.between[one.label], one.metrics
        assert not np.diag(matrix).any()
        moved = (metrics["intra_bytes"].value + metrics["inter_bytes"].value) / model.copy_bytes
        dropped = found.part.dropped_samples > 0
        assert matrix.sum() == pytest.approx(moved, rel=0.1 if dropped else 1e-9)


def test_experts_that_move_from_the_first_plan_are_counted_with_their_bytes(make_trace: Any, tmp_path: Path) -> None:
    trace = make_trace(samples=60)
    paths = [planned(trace, tmp_path / f"{seed}.json", seed=seed, redundant=4 * seed) for seed in (0, 1)]
    found = compare([*paths], trace.path)
    assert found.compared[0].moves is None
    moves = found.compared[1].moves
    assert moves is not None
    old, new = (load(path).placement for path in paths)
    assert old is not None
    assert new is not None
    expected = sum(
        len({*new.held(layer, device)} - {*old.held(layer, device)})
        for layer in range(new.num_layers)
        for device in range(4)
    )
    assert (moves.experts, moves.held) == (expected, new.num_slots * new.num_layers)
    assert moves.num_bytes == expected * 3 * 96 * trace.model.copy_bytes
    assert compare([paths[0], planned(trace, tmp_path / "again.json")], trace.path).compared[1].moves.experts == 0  # type: ignore[union-attr]


def test_the_page_has_a_matrix_a_contender_with_its_bytes(make_trace: Any, tmp_path: Path) -> None:
    trace = make_trace(samples=64)
    path = planned(trace, tmp_path / "plan.json", redundant=4)
    found = compare([path], trace.path, between=True)
    write_matrices(found, tmp_path / "page.html")
    page, copies, each = (tmp_path / "page.html").read_text(), found.between[f"{path}/standard"], found.copy_bytes
    assert page.count("<h2>") == len(found.part.contenders) == 3
    assert each is not None
    far = copies[:2, 2:].sum() + copies[2:, :2].sum()
    assert f"{copies.sum() * each / 1e6:.4g} MB a step, {far * each / 1e6:.4g} of them between nodes" in page
