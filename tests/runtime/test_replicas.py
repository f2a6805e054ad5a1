"""Experts with one owner: training with replicas and owners that change at every step is that of one process."""

import functools

import pytest
import torch

from tests.runtime.replica_cases import (
    MICRO,
    OPTIMIZERS,
    REPLICAS,
    Trained,
    Training,
    Ways,
    in_one_process,
    trained,
    ways,
)
from tests.runtime.worlds import by_rank, close

FIXED = [Training(name, seed=seed) for seed, name in enumerate(OPTIMIZERS)]
MOVING = [Training(name, moves=True, seed=seed) for seed, name in enumerate(OPTIMIZERS, 10)]
BROKEN = [
    Training("sgd", broken="weights"),
    Training("sgd", broken="gradients"),
    Training("adamw", moves=True, broken="states", seed=12),
]
WORLDS = {2: FIXED + BROKEN, 4: FIXED + MOVING}


@functools.cache
def answers(num_ranks: int) -> dict[Training, list[Trained]]:
    """By training, then rank."""
    by_training = zip(*by_rank(num_ranks, trained, WORLDS[num_ranks], timeout_s=400), strict=True)
    return dict(zip(WORLDS[num_ranks], map(list, by_training), strict=True))


@functools.cache
def expected(optimizer: str, num_ranks: int) -> Trained:
    return in_one_process(Training(optimizer), num_ranks)


@pytest.mark.parametrize(("num_ranks", "training"), [(2, t) for t in FIXED] + [(4, t) for t in FIXED + MOVING], ids=str)
def test_fifty_steps_under_replicas_and_owners_that_change_are_those_of_one_process(
    num_ranks: int, training: Training
) -> None:
    ranks = answers(num_ranks)[training]
    alone = expected(training.optimizer, num_ranks)
    for rank in ranks:
        assert rank.losses == pytest.approx(alone.losses, rel=1e-9)
        assert rank.equal
    assert sum(rank.compared for rank in ranks) > 50 * 3 * 4
    whole = ranks[0]
    for saved, state in ((whole.saved, alone.saved), (whole.state, alone.state)):
        assert list(saved) == list(state)
        assert all(close(saved[name], value, 1e-8) for name, value in state.items())
    for number, state in alone.optimizer["state"].items():
        for name, value in state.items():
            assert value is None or close(whole.optimizer["state"][number][name], value, 1e-8)
    assert len(set(alone.losses)) == len(alone.losses)


@pytest.mark.parametrize("training", BROKEN, ids=str)
def test_without_weights_gradients_or_states_that_travel_the_losses_are_others(training: Training) -> None:
    rank, alone = answers(2)[training][0], expected(training.optimizer, 2)
    assert max(abs(a / b - 1) for a, b in zip(rank.losses, alone.losses, strict=True)) > 1e-3


@pytest.fixture(scope="module")
def two() -> list[Ways]:
    return by_rank(2, ways)


def test_gradients_are_those_of_one_process_however_micro_batches_are_accumulated(two: list[Ways]) -> None:
    whole = REPLICAS.model()
    for part in range(MICRO):
        (whole(REPLICAS.tokens(part)) * REPLICAS.upstream()).sum().div(2).backward()
    stacked = [one.grad for name, one in whole.named_parameters() if ".experts." in name]
    for rank in two:
        for way, gradients in rank.gradients.items():
            owned = [gradient.norm() for gradient in gradients]
            assert len(owned) == len(stacked), way
    for way in two[0].gradients:
        for number, gradient in enumerate(stacked):
            assert gradient is not None
            squares = sum(rank.gradients[way][number].square().sum() for rank in two)
            torch.testing.assert_close(squares, gradient.square().sum(), rtol=1e-10, atol=0)


def test_sums_of_replicas_run_once_a_step_where_micro_batches_say_so(two: list[Ways]) -> None:
    layers = REPLICAS.num_layers
    for rank in two:
        assert rank.sums == {
            "summed every time": MICRO * layers,
            "no_sync": layers,
            "no_sync of DDP": layers,
            "all put off": layers,
            "one forward, one backward": MICRO * layers,
            "evaluated between": MICRO * layers,
        }


def test_gradients_are_the_same_to_the_bit_where_layers_share_the_memory_of_replicas(two: list[Ways]) -> None:
    for rank in two:
        for way, gradients in rank.gradients.items():
            assert all(map(torch.equal, gradients, rank.shared[way])), way
        plain, broken = rank.gradients["summed every time"], rank.shared["not brought back"]
        assert not all(map(torch.equal, plain, broken))


def test_what_was_put_off_is_dropped_with_the_gradients_it_belongs_to(two: list[Ways]) -> None:
    assert all(rank.facts["dropped"] for rank in two)


def test_replicas_follow_weights_that_are_changed_by_hand_and_copies_of_models_are_their_own(two: list[Ways]) -> None:
    for rank in two:
        assert rank.facts["by hand"] == [True] * 4
        assert rank.facts["by hand where memory is shared"] == [True] * 4


def test_states_and_saved_files_hold_owned_experts_only(two: list[Ways]) -> None:
    row = 2 * 16 * 12 * 8
    for rank in two:
        (owned, *rows), num_bytes, replica_bytes = rank.facts["saved"]
        assert rows == [owned, owned]
        assert replica_bytes == (6 - owned) * row > 0
        assert num_bytes < owned * row + 3000


def test_the_norm_counts_every_expert_once(two: list[Ways]) -> None:
    for rank in two:
        ours, alone = rank.facts["norms"]
        assert ours == pytest.approx(alone, rel=1e-10)


def test_weights_of_a_layer_leave_before_the_layer_before_it_computes_and_once_a_step(two: list[Ways]) -> None:
    for rank in two:
        first = ["send 0", "send 1", "compute 0", "send 2", "compute 1", "compute 2"]
        assert rank.facts["ahead"] == [*first, "compute 0", "compute 1", "compute 2"]
        assert rank.facts["ahead where memory is shared"] == [*first, *first, "send 1", "send 0"]


def test_layers_that_share_memory_take_that_of_one(two: list[Ways]) -> None:
    for rank in two:
        resident, apart, shared, owned = rank.facts["memories"]
        assert apart == resident
        assert shared == resident / REPLICAS.num_layers + owned


def test_a_backward_pass_is_refused_where_weights_changed_after_its_forward(two: list[Ways]) -> None:
    for rank in two:
        for said in rank.facts["changed between"]:
            assert said.startswith("UsageError: experts' weights changed between a forward and its backward pass;")


def test_weights_that_nobody_trains_are_sent_once(two: list[Ways]) -> None:
    assert [rank.facts["frozen"] for rank in two] == [REPLICAS.num_layers] * 2


def test_owners_do_not_change_under_an_optimizer_whose_state_is_not_by_expert(two: list[Ways]) -> None:
    for rank in two:
        said = rank.facts["refused"]
        assert said["AdamW"] == "accepted"
        for name in ("Adafactor", "Lamb"):
            assert said[name].startswith(f"UsageError: rank 0: experts cannot change owners under {name}, whose state")
        assert said["copies"].startswith("UsageError: rank 0: AdamW does not hold the experts' parameters")
        assert said["steps"].startswith("MismatchError: rank 1's optimizer has other states of experts than rank 0's")
