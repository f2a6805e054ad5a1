"""Copies that others stand for, on four real processes, held against an emulation in one process."""

import functools
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from moeplan.errors import MismatchError, UsageError
from moeplan.runtime.condensation import Condensation, next_tau
from moeplan.runtime.decisions import CondensationDecision
from tests.builders import known
from tests.runtime.condensation_cases import (
    CASES,
    COARSE,
    LEARNT,
    RATE,
    STEPS,
    TRAININGS,
    Answer,
    Condensed,
    loss_of,
    run_condensed,
)
from tests.runtime.condensation_reference import CondensedExperts, condensed, gradients_of
from tests.runtime.worlds import by_rank, close, summed

emulated_cases = pytest.mark.parametrize("name", CASES)
every_case = pytest.mark.parametrize("name", CASES | COARSE)


@functools.cache
def answers() -> list[Answer]:
    """By rank."""
    return by_rank(4, run_condensed, timeout_s=300)


def ranks(name: str) -> list[Condensed]:
    """Of a case."""
    return [answer.cases[name] for answer in answers()]


@functools.cache
def emulated(name: str) -> tuple[np.ndarray, dict[str, np.ndarray], list[CondensedExperts]]:
    """Logits, gradients and layers of a case in one process."""
    case, decided = CASES[name]
    rule = {"medoid": decided.get("medoid", False), "cosine": "threshold" in decided, "gains": decided.get("gains")}
    model, layers = condensed(case, **rule)
    for layer in layers:
        layer.reach = (2 - 2 * decided["threshold"]) ** 0.5 if "threshold" in decided else decided["tau"]
    logits = model(case.tokens())
    (logits * case.upstream()).sum().backward()
    return logits.detach().numpy(), gradients_of(model), layers


@emulated_cases
def test_logits_and_gradients_are_those_of_an_emulation_in_one_process(name: str) -> None:
    logits, gradients, _ = emulated(name)
    assert close(np.concatenate([rank.logits for rank in ranks(name)]), logits)
    for parameter, expected in gradients.items():
        assert close(summed(ranks(name), parameter), expected), parameter


@emulated_cases
def test_rows_sent_and_spared_are_those_of_the_emulation(name: str) -> None:
    rows_D, sent_D = (
        np.sum([getattr(layer.seen, what) for layer in emulated(name)[2]], axis=0) for what in ("rows", "sent")
    )
    copies, condensed = ([getattr(rank.traffic, what) for rank in ranks(name)] for what in ("copies", "condensed"))
    assert condensed == (2 * (rows_D - sent_D)).tolist()
    assert sum(copies) == 2 * sent_D.sum()
    assert 0.1 * sum(copies) < sum(condensed)


@every_case
def test_blocks_that_run_again_fold_as_they_did(name: str) -> None:
    assert all(rank.again for rank in ranks(name))


@every_case
def test_without_a_threshold_outputs_gradients_and_traffic_are_those_of_a_plan_that_condenses_nothing(
    name: str,
) -> None:
    assert all(rank.bare == (True, True) for rank in ranks(name))


@every_case
def test_evaluation_condenses_only_where_asked_to(name: str) -> None:
    spared = [rank.spared for rank in ranks(name)]
    assert not any(off for off, _ in spared)
    assert [on for _, on in spared] == [rank.traffic.condensed for rank in ranks(name)]


@pytest.mark.parametrize("name", TRAININGS)
def test_fifty_steps_of_four_ranks_under_a_moving_threshold_are_those_of_the_emulation(name: str) -> None:
    trained, decided = [answer.trained[name] for answer in answers()], TRAININGS[name]
    model, layers = condensed(LEARNT, cosine=name == "paper")
    optimizer, tau, first = torch.optim.SGD(model.parameters(), RATE), decided.get("tau"), 0.0
    for step in range(STEPS):
        for layer in layers:
            layer.reach = tau
        whole = model(LEARNT.tokens(step)), LEARNT.upstream()
        losses = [loss_of(*(of.split(LEARNT.batches)[rank] for of in whole)) for rank in range(4)]
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        rows, sent = (sum(sum(getattr(layer.seen, what)) for layer in layers) for what in ("rows", "sent"))
        if name == "share":
            tau *= np.exp(decided["target"] - (1 - sent / rows))
        else:
            mean = round(sum(loss.item() for loss in losses) / 4 * 2**20) / 2**20
            first = first or mean
            tau = (2 - 4 * decided["h_max"] / (1 + np.exp(decided["kappa"] * (first - mean) / first))) ** 0.5
        np.testing.assert_allclose([rank.losses[step] for rank in trained], [loss.item() for loss in losses], 1e-9)
        assert close([rank.tau[step] for rank in trained], [tau] * 4, 1e-9)
        if tau is not None and decided.get("tau"):
            assert close([rank.saved[step] for rank in trained], [1 - sent / rows] * 4)
    assert trained[0].losses[-1] < 0.95 * trained[0].losses[0]
    saved_s, tau_s = np.array([trained[0].saved, trained[0].tau], dtype=float)
    if name == "share":
        assert abs(saved_s[STEPS // 2 :].mean() - decided["target"]) < 0.05
    else:
        assert tau_s[-1] > tau_s[0]
    for parameter, value in model.state_dict().items():
        assert close(trained[0].state[parameter], value, 1e-9), parameter


def test_only_the_layers_of_the_decision_condense() -> None:
    place = SimpleNamespace(slot_of_expert=torch.zeros(1))
    blocks: list[Any] = [SimpleNamespace(placement=place, condenser=None) for _ in range(3)]
    done = Condensation(CondensationDecision(tau=0.1, layers=(0, 2)), blocks, None)
    done.tau, done.in_eval = 0.3, True
    assert [block.condenser and (block.condenser.reach, block.condenser.in_eval) for block in blocks] == [
        (0.3, True),
        None,
        (0.3, True),
    ]


def test_a_share_that_cannot_be_held_moves_its_threshold_no_further_than_counts() -> None:
    decision, tau = CondensationDecision(tau=0.2, schedule="share", target=0.9), 0.2
    for _ in range(100):
        tau = known(next_tau(decision, tau, 0.5, None, None))  # without a loss, too
    assert tau == 4.0  # unit vectors are 2 apart at most
    for _ in range(10):
        tau = known(next_tau(decision, tau, 1.0, 1.0, 1.0))
    assert tau == pytest.approx(4.0 * np.exp(-0.1 * 10))
    nothing = CondensationDecision(tau=0.2, schedule="share", target=0.5, gains=((0.0, 0.0),))
    assert next_tau(nothing, 0.2, 0.6, None, None) == 1e-6  # from which it can rise again
    assert next_tau(decision, None, 0.5, None, None) is None  # left off


def test_states_and_thresholds_that_are_none_are_refused() -> None:
    place = SimpleNamespace(slot_of_expert=torch.zeros(1))
    block = cast(Any, SimpleNamespace(placement=place, condenser=None))
    done = Condensation(CondensationDecision(tau=0.1), [block], None)
    with pytest.raises(UsageError, match="tau nan; expected a distance"):
        done.tau = float("nan")
    with pytest.raises(MismatchError, match="a state of condensation without first_loss"):
        done.load_state_dict({"tau": 0.1})


def test_what_cannot_be_carried_out_beside_condensation_is_refused_by_name() -> None:
    for answer in answers():
        words = {
            "coherent": "condensation beside coherent dispatch",
            "migrating": "condensation beside migrating dispatch",
            "history": "condensation by the similarities of the layer before (s1, s2)",
            "two forwards": "two checkpointed forwards before one backward under condensation",
            "another forward": "a checkpointed forward with condensation is run again after another forward",
            "nothing condensed": "accepted",
        }
        for name, expected in words.items():
            assert expected in answer.refused[name], answer.refused[name]
