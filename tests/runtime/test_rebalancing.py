"""Replicas that follow the load, on real ranks: training is that of one process, and all hold the same tables."""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeplan.runtime.engine.layer_placement import LayerPlacement
from moeplan.runtime.engine.loads import Counts, Loads
from moeplan.runtime.rebalancing import placement_of, policy_of, tables_of
from moeplan.solvers import quota
from moeplan.solvers.flexmoe import Seen
from moeplan.solvers.flexmoe.state import holds, homes_after
from tests.runtime.rebalancing_cases import (
    EXPERTS,
    Anything,
    ByRank,
    Run,
    Trained,
    drawn,
    facts,
    in_one_process,
    trained,
)
from tests.runtime.worlds import by_rank, close

SGD, ADAMW = Run("sgd"), Run("adamw")
DRAWN = {name: Run(name, Anything(seed)) for seed, name in enumerate(("sgd", "adamw"))}
MICRO = Run("adamw", micro=3, steps=12)
NEVER = Run("adamw", trigger=1e8)
RARELY = Run("adamw", Anything(2), record_steps=5, steps=20)
BESIDE = {
    what: replace(DRAWN["sgd"], steps=8, beside=what) for what in ("", "eval", "unused", "reentrant", "not reentrant")
}
BESIDE_MOVES = ("degrees", "fsdp", "fsdp by layer", "rounds")
STACKED = [replace(DRAWN["adamw"], steps=8, beside=what) for what in BESIDE_MOVES]
AUTOCAST = replace(DRAWN["sgd"], steps=8, beside="autocast")
BY_RANK = Run("sgd", ByRank(), steps=8)
FEW = replace(DRAWN["adamw"], steps=20, moves_per_step=3)
INTERFERED = [replace(DRAWN["adamw"], steps=16, beside=what) for what in ("skipped", "changed")]
RESIDENT = {
    2: [DRAWN["adamw"], MICRO, *BESIDE.values(), *STACKED, AUTOCAST],
    4: [DRAWN["adamw"], MICRO, BESIDE["reentrant"], BESIDE["not reentrant"]],
}
SHARED = {ranks: {run: replace(run, memory="shared") for run in runs} for ranks, runs in RESIDENT.items()}
RUNS = {
    2: [SGD, ADAMW, *DRAWN.values(), MICRO, NEVER, RARELY, *BESIDE.values(), *STACKED, AUTOCAST, BY_RANK, FEW],
    4: [SGD, ADAMW, *DRAWN.values(), MICRO, BY_RANK, BESIDE["reentrant"], BESIDE["not reentrant"]],
    8: [replace(DRAWN["adamw"], steps=12)],
}
POLICIES = [(ranks, run) for ranks, runs in RUNS.items() for run in runs if run.rule is None and run is not NEVER]


@functools.cache
def answers(num_ranks: int) -> dict[Run, list[Trained]]:
    """By run, then rank."""
    runs = [*RUNS[num_ranks], *SHARED.get(num_ranks, {}).values(), *(INTERFERED if num_ranks == 2 else ())]
    by_run = zip(*by_rank(num_ranks, trained, runs, timeout_s=400), strict=True)
    return dict(zip(runs, map(list, by_run), strict=True))


@functools.cache
def alone(run: Run, num_ranks: int) -> Trained:
    return in_one_process(run, num_ranks)


def every_run(test: Any) -> Any:
    return pytest.mark.parametrize(("num_ranks", "run"), [(n, run) for n in RUNS for run in RUNS[n]], ids=str)(test)


@every_run
def test_training_is_that_of_one_process(num_ranks: int, run: Run) -> None:
    beside = run.beside if run.autocast else ""
    ranks, expected = answers(num_ranks)[run], alone(replace(run, rule=None, beside=beside), num_ranks)
    for rank in ranks:
        assert rank.losses == pytest.approx(expected.losses, rel=1e-2 if run.autocast else 1e-9)
    assert list(ranks[0].state) == list(expected.state)
    assert len(set(expected.losses)) == run.steps
    if run.autocast:  # bfloat16 rounds what other ranks sum: less than what was learned, by far
        start = run.case(num_ranks).model().state_dict()
        assert _apart(ranks[0].state, expected.state) < 0.05 * _apart(start, expected.state)
    else:
        assert all(close(ranks[0].state[name], value, 1e-8) for name, value in expected.state.items())


def _apart(state: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((state[name] - value).square().sum()) for name, value in other.items()))


@every_run
def test_all_ranks_hold_the_same_tables_and_what_they_say(num_ranks: int, run: Run) -> None:
    ranks = answers(num_ranks)[run]
    for step, tables in enumerate(ranks[0].tables):
        for number, rank in enumerate(ranks):
            assert (rank.tables[step] == tables).all()
            assert [sorted(held) for held in rank.held[step]] == [sorted(set(row) - {-1}) for row in tables[:, number]]
    assert ranks[0].facts["operations"] == ranks[-1].facts["operations"]


@every_run
def test_all_ranks_count_what_was_routed_in_a_step(num_ranks: int, run: Run) -> None:
    ranks = answers(num_ranks)[run]
    expected = np.stack([np.stack(rank.counts) for rank in ranks], axis=-1)  # [steps, L, E, D]
    for rank in ranks:
        assert rank.facts["steps"] == run.steps
        last = np.arange(run.steps) // run.record_steps * run.record_steps
        assert np.array_equal(rank.recorded, expected[last])


@every_run
def test_the_balance_told_is_that_of_the_tables_before(num_ranks: int, run: Run) -> None:
    if run.micro > 1:
        return
    ranks, start = answers(num_ranks)[run], tables_of(run.case(num_ranks).placement())
    computed = np.array([rank.computed for rank in ranks])  # [D, steps, L]
    for rank in ranks:
        assert np.stack(rank.balance) == pytest.approx(computed.max(axis=0) / computed.mean(axis=0))
    counts = np.stack([np.stack(rank.counts) for rank in ranks], axis=-1)
    for step, layer in np.ndindex(*computed.shape[1:]):
        table = ranks[0].tables[step - 1][layer] if step else start[layer]
        placed = placement_of(table, EXPERTS)
        holders = quota.holders_of(placed.physical_to_logical[0], placed.slots, EXPERTS, num_ranks)
        least, _, _ = quota.least(counts[step, layer].sum(axis=1), holders)
        assert computed[:, step, layer].sum() == counts[step, layer].sum()  # every pair is computed once
        assert computed[:, step, layer].max() == least


def test_balance_over_micro_batches_is_their_mean_by_pairs() -> None:
    load = Loads()
    assert load.balance == 1
    load.add(Counts(np.array([[6, 0], [0, 2]]), 6), torch.zeros(0))
    load.add(Counts(np.array([[1, 1], [1, 1]]), 2), torch.zeros(0))
    assert load.balance == pytest.approx((8 * (6 / 4) + 4 * (2 / 2)) / 12)
    load.clear()
    assert load.balance == 1


@pytest.mark.parametrize(("num_ranks", "run"), [(n, run) for n in SHARED for run in SHARED[n]], ids=str)
def test_layers_that_share_the_memory_of_replicas_train_to_the_bit_as_those_that_do_not(
    num_ranks: int, run: Run
) -> None:
    for one, other in zip(*(answers(num_ranks)[which] for which in (run, SHARED[num_ranks][run])), strict=True):
        assert one.losses == other.losses
        assert np.array_equal(one.tables, other.tables)
        assert list(one.state) == list(other.state)
        assert all(torch.equal(value, other.state[name]) for name, value in one.state.items())


@pytest.mark.parametrize(("num_ranks", "run"), POLICIES, ids=str)
def test_tables_are_those_that_the_policy_decides_from_the_counts(num_ranks: int, run: Run) -> None:
    ranks = answers(num_ranks)[run]
    counts = np.stack([np.stack(rank.counts) for rank in ranks], axis=-1)
    decision = run.plan(num_ranks).decisions.rebalancing
    assert decision is not None
    rule, costs = policy_of(decision)
    for layer, table in enumerate(tables_of(run.case(num_ranks).placement())):
        home, decided, told = ranks[0].owners[layer], None, None
        for step in range(run.steps):
            if told is not None:  # experts have travelled
                home, table = homes_after(home, holds(told, EXPERTS), num_ranks), told
            told = decided
            assert (ranks[0].tables[step][layer] == table).all()
            assert (layer in ranks[0].coming[step]) == (told is not None and bool((told != table).any()))
            window = counts[max(0, step + 1 - rule.window) : step + 1, layer, None]
            after = table if told is None else told
            owners = homes_after(home, holds(after, EXPERTS), num_ranks)
            placed = placement_of(after, EXPERTS)
            holders = quota.holders_of(placed.physical_to_logical[0], placed.slots, EXPERTS, num_ranks)
            least, _, _ = quota.least(window[-1, 0].sum(axis=1), holders)
            balance = least * num_ranks / window[-1].sum()
            decided = rule(Seen(step, layer, window, after, owners, balance, num_ranks, costs))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_policy_changes_tables_at_most_steps_and_leaves_slots_empty(num_ranks: int) -> None:
    for run in (SGD, ADAMW):
        done = answers(num_ranks)[run][0]
        steps = {step for step, _ in done.facts["changes"]}
        assert len(steps) > run.steps // 3
        assert min(steps) >= 3  # of step 0, decided beside step 1, on their way beside step 2
        assert {one.kind for one in done.facts["operations"]} == {"expand", "shrink", "migrate"}
        assert any((tables == -1).any() for tables in done.tables)
        assert done.facts["moved"] > 0
        assert sum(rank.facts["planning_s"] for rank in answers(num_ranks)[run]) > 0


def test_the_log_leads_from_the_start_to_the_last_tables() -> None:
    for run in (ADAMW, DRAWN["adamw"], RARELY):
        done = answers(2)[run][0]
        held = [{(e, d) for d, row in enumerate(t) for e in row} for t in tables_of(run.case(2).placement()).tolist()]
        for one in done.facts["operations"]:
            if one.kind != "expand":
                held[one.layer].remove((one.expert, one.source))
            if one.kind != "shrink":
                held[one.layer].add((one.expert, one.target))
        last = [{(e, d) for d, row in enumerate(t) for e in row if e >= 0} for t in done.tables[-1].tolist()]
        assert held == last


def test_a_policy_that_never_moves_changes_nothing() -> None:
    done, start = answers(2)[NEVER], tables_of(NEVER.case(2).placement())
    for rank in done:
        assert rank.facts["operations"] == rank.facts["changes"] == []
        assert rank.facts["moved"] == 0
        assert all((tables == start).all() for tables in rank.tables)


def test_records_are_of_one_step_in_so_many_and_tables_change_three_steps_later() -> None:
    changed = {step for step, _ in answers(2)[RARELY][0].facts["changes"]}
    assert changed
    assert changed <= {3, 8, 13, 18}


@every_run
def test_experts_travel_while_a_step_runs_and_their_layer_changes_after_it(num_ranks: int, run: Run) -> None:
    done = answers(num_ranks)[run][0]
    for step, coming in enumerate(done.coming[:-1]):
        before, after = done.tables[step], done.tables[step + 1]
        assert all((before[layer] != after[layer]).any() for layer in coming)
        assert all((step + 2, layer) in done.facts["changes"] for layer in coming)
    assert bool(done.facts["moved"]) == any(done.coming[:-1])
    assert done.facts["sent again"] == 0


@pytest.mark.parametrize("run", INTERFERED, ids=str)
def test_a_move_goes_on_over_a_skipped_step_and_is_made_again_where_weights_were_written_to(run: Run) -> None:
    ranks, expected = answers(2)[run], alone(replace(run, rule=None), 2)
    for rank in ranks:
        assert rank.losses == pytest.approx(expected.losses, rel=1e-9)
        assert rank.facts["moved"] > 10
        assert bool(rank.facts["sent again"]) == (run.beside == "changed")
    assert all(close(ranks[0].state[name], value, 1e-8) for name, value in expected.state.items())


def moves_of(run: Run) -> np.ndarray:
    """Experts whose owner changed after each step, by layer, `[B, L]`."""
    done, moves = answers(2)[run][0], list[list[int]]()
    before, owners = tables_of(run.case(2).placement()), done.owners.copy()
    for tables in done.tables:
        after = [
            homes_after(owner, holds(new, EXPERTS), 2) if (old != new).any() else owner
            for owner, old, new in zip(owners, before, tables, strict=True)
        ]
        moves.append([int((one != other).sum()) for one, other in zip(owners, after, strict=True)])
        before, owners = tables, np.array(after)
    return np.array(moves)


def test_few_experts_change_their_owner_after_a_step_where_that_is_asked_for_and_the_others_later() -> None:
    free, few = moves_of(DRAWN["adamw"]), moves_of(FEW)
    assert FEW.moves_per_step == 3 < free.sum(axis=1).max()
    assert few.sum() == answers(2)[FEW][0].facts["moved"] > 20
    assert all(step.sum() <= 3 or np.count_nonzero(step) == 1 for step in few)
    assert (few.sum(axis=0) > 0).all()  # no layer waits for ever
    changed = [{layer for at, layer in answers(2)[FEW][0].facts["changes"] if at == step} for step in range(1, 20)]
    late = [later - earlier for earlier, later in itertools.pairwise(changed)]
    assert any(late)


@pytest.mark.parametrize("what", BESIDE)
def test_forwards_that_train_nothing_do_not_count_and_those_that_run_again_count_once(what: str) -> None:
    plain, beside = answers(2)[BESIDE[""]][0], answers(2)[BESIDE[what]][0]
    assert np.array_equal(plain.tables, beside.tables)
    assert np.array_equal(plain.recorded, beside.recorded)
    assert np.array_equal(plain.balance, beside.balance)


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return by_rank(2, facts, timeout_s=400)


@pytest.mark.parametrize("which", ["resumed", "resumed between layers"])
def test_a_training_resumes_as_it_would_have_gone_on(which: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        whole = rank[which]["whole"]
        for way in ("early", "late"):
            tables, losses, operations = rank[which][way]
            assert np.array_equal(tables, whole[0])
            assert losses == whole[1]
            assert operations == whole[2]
        assert len({table.tobytes() for table in whole[0]}) > 3


@pytest.mark.parametrize("which", ["replayed", "replayed from file"])
def test_a_schedule_is_replayed_in_place_of_the_policy(which: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        tables, schedule, _, losses = rank[which]
        for step, held in enumerate(tables):
            expected = schedule[max(start for start in schedule if start <= step)]
            assert (np.sort(held, axis=2) == np.sort(expected, axis=2)).all()
        assert len({one.tobytes() for one in tables}) > 4
        assert losses == pytest.approx(alone(Run("adamw", steps=12), 2).losses, rel=1e-9)
    computed = np.array([rank[which][2] for rank in two]).sum(axis=0)
    assert (computed == 2 * 12 * 2).all()  # ranks, tokens, experts a token


def test_memory_does_not_grow_over_500_steps(two: list[dict[str, Any]]) -> None:
    for rank in two:
        early, late = rank["memory"]
        assert late.count == pytest.approx(early.count, abs=5)  # tokens go other ways, and some tensors are empty
        assert late.tensor_bytes == pytest.approx(early.tensor_bytes, rel=0.01)
        left = late.resident_bytes - early.resident_bytes  # the log of what was done, too
        assert left < 300 * rank["row bytes"] / 2, "weights of an expert in every other step"


def test_ranks_that_would_decide_otherwise_each_hold_the_same_tables(two: list[dict[str, Any]]) -> None:
    one, other = (rank["by itself"] for rank in two)
    assert not np.array_equal(one, other)
    for rank in answers(2)[BY_RANK]:
        assert np.array_equal(rank.tables, answers(2)[BY_RANK][0].tables)
        assert rank.facts["moved"] > 0


def test_what_cannot_be_done_is_refused_in_a_line(two: list[dict[str, Any]]) -> None:
    state = "MismatchError: rank 0: a state of rebalancing with"
    words = {
        "cast": "UsageError: tokens of torch.bfloat16 for experts of torch.float32; give both one type, or run",
        "kept": "UsageError: experts moved between a forward and its backward pass",
        "let go": "accepted",
        "nobody": "UsageError: AdamW took two steps and holds none of the experts' parameters",
        "Adafactor": "UsageError: rank 0: experts cannot change owners under Adafactor",
        "Lamb": "UsageError: rank 0: experts cannot change owners under Lamb",
        "Lars": "UsageError: rank 0: experts cannot change owners under Lars",
        "at once": "UsageError: rank 0: experts cannot change owners under Adafactor",
        "at once, schedule": "UsageError: rank 0: experts cannot change owners under Adafactor",
        "owners stay": "accepted",
        "stays": "accepted",
        "Named": "accepted",
        "SGD": "accepted",
        "paper": "UsageError: rank 0: rebalancing by method paper, which splits steps by its own rule",
        "shape": "InputError: rank 0: schedule, step 3: a table [3, 2, 5] of int64; expected whole numbers [3, 2, 6]",
        "absent": "InputError: rank 0: schedule, step 4, layer 1: placement of layer 0 leaves out expert 3",
        "other": "MismatchError: rank 1 holds another schedule or number of moves of rebalancing than rank 0",
        "words": "InputError: rank 0: a schedule that is no tables by step; expected a dict",
        "ragged": "InputError: rank 0: a schedule with a table that has no shape",
        "no rebalancing": "UsageError: rank 0: a schedule for a plan that decides no rebalancing",
        "no memory": "UsageError: rank 0: replica_memory='swapped'; expected one of ('resident', 'shared')",
        "other memory": "MismatchError: rank 1 holds plan ",
        "no moves": "UsageError: rank 0: moves_per_step=0; expected a number, 1 or more",
        "half a move": "UsageError: rank 0: moves_per_step=nan; expected a number, 1 or more",
        "no state": "MismatchError: rank 0: a state of rebalancing without balance; expected one of state_dict()",
        "other sizes": f"{state} tables [3, 2, 5] of int64; expected whole numbers [3, 2, 6] from -1 to 7: load it",
        "other state": "MismatchError: rank 1 holds another state of rebalancing than rank 0",
        "other here": "MismatchError: rank 1: a state of rebalancing with step -1; expected one of state_dict()",
        "no step": f"{state} step None; expected one of state_dict()",
        "moved": f"{state} moved -1; expected one of state_dict()",
        "nothing to decide by": f"{state} deciding True; expected one of state_dict()",
        "no time": f"{state} planning_s nan; expected one of state_dict()",
        "no window": f"{state} window None; expected one of state_dict()",
        "balance": f"{state} balance [2] of float64; expected 3 numbers",
        "operations": f"{state} operations [(1, 2)]; expected rows of 6",
        "owner": f"{state} owners [3, 8] of int64, 0 to 2; expected whole numbers [3, 8] from 0 to 1: load it",
        "owner without": f"{state} device ",
        "expert": f"{state} tables [3, 2, 6] of int64, 0 to 8; expected whole numbers [3, 2, 6] from -1 to 7: load it",
        "left out": f"{state} decided_last, layer 2: placement of layer 0 leaves out expert ",
        "window": f"{state} a record of window [3, 8, 2] of int64, -1 to -1; expected whole numbers [3, 8, 2] from 0",
        "window of others": f"{state} a record of window [3, 7, 2] of int64; expected whole numbers [3, 8, 2] from 0",
        "window of shares": f"{state} a record of window [3, 8, 2] of float32; expected whole numbers",
        "a window": "accepted",
        "nothing comes": f"{state} coming [1]; expected some of []",
        "what comes": f"{state} coming None; expected one of state_dict()",
        "half comes": f"{state} coming [1.0]; expected some of []",
        "pending": "UsageError: rank 0: a state of rebalancing loaded between a backward pass and the optimizer's step",
        "dropped": "accepted",
    }
    for rank in two:
        for name, said in rank["refused"].items():
            assert said.startswith(words[name])
            assert "\n" not in said


def test_frozen_experts_follow_the_load_as_well(two: list[dict[str, Any]]) -> None:
    for rank in two:
        (one, steps), (of_two, steps_of_two) = rank["frozen"]
        assert one == of_two
        assert one
        assert steps == steps_of_two == 4


def test_steps_without_a_forward_and_closures_leave_tables_and_losses_as_they_are(two: list[dict[str, Any]]) -> None:
    for rank in two:
        usual, *others = rank["other steps"].values()
        assert usual[-1][2]
        for told in others:
            for (loss, tables, changes), (expected, under, by) in zip(told, usual, strict=True):
                assert loss == pytest.approx(expected, rel=1e-12)
                assert np.array_equal(tables, under)
                assert changes == by


def test_the_optimizer_of_experts_counts_steps(two: list[dict[str, Any]]) -> None:
    for rank in two:
        changes, steps = rank["two optimizers"]
        assert changes > 0
        assert steps == 4


def test_a_copy_of_the_model_follows_nothing_and_a_rebalancer_goes_with_its_model(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert rank["copied"] == (True, True)
        assert rank["let go"]


# In one process


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(0, 3))
def test_any_table_routes_every_pair_to_a_holder_and_rows_of_replicas_meet(seed: int, ranks: int, spare: int) -> None:
    rng = np.random.default_rng(seed)
    table = drawn((ranks, min(EXPERTS, -(-EXPERTS // ranks) + spare)), rng)
    pairs = rng.integers(0, 50, (EXPERTS, ranks))
    places = [_seen_by(rank, table) for rank in range(ranks)]
    assert sorted(e for place in places for e in place.owned) == [*range(EXPERTS)]
    placed = placement_of(table, EXPERTS)
    for rank, place in enumerate(places):
        assert sorted(place.held) == sorted(set(table[rank]) - {-1})
        assert place.quota is not None  # loads are counted where nobody has replicas
        dealt, most = quota.split(pairs, place.quota.holders, 8)
        served, experts = np.zeros(ranks, int), place.quota.holders.expert
        for slot, device in enumerate(place.quota.holders.device):
            assert places[device].slot_of_expert[experts[slot]] >= 0
            served[device] += dealt[slot].sum()
        assert served.sum() == pairs.sum()
        assert served.max() == most
        for expert in range(EXPERTS):
            assert (dealt[experts == expert].sum(axis=0) == pairs[expert]).all()
    if (placed.holds(0).sum(axis=1) > 1).any():
        cuts = []
        for rank, place in enumerate(places):
            with _rank(rank, ranks):
                assert place.rows is not None
                cuts.append(place.rows._cut(24))
        for which in ("scatter", "exchange"):
            for a, b in np.ndindex(ranks, ranks):
                assert getattr(cuts[a], which).sent[0][b] == getattr(cuts[b], which).received[0][a]


@contextlib.contextmanager
def _rank(rank: int, size: int) -> Iterator[None]:
    """Take the place of one rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_rank", lambda group=None: rank)
        patch.setattr(dist, "get_world_size", lambda group=None: size)
        yield


def _seen_by(rank: int, table: np.ndarray) -> LayerPlacement:
    with _rank(rank, len(table)):
        return LayerPlacement.of(placement_of(table, EXPERTS), 0, devices_per_node=1, group=None, counted=True)
