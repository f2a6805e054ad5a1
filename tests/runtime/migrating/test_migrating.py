"""The migrating forward on real gloo processes, against the same model in one process, sample by sample."""

import itertools
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from moeplan.runtime.engine.owners import owners_of
from moeplan.runtime.engine.traffic import Traffic
from moeplan.solvers.luffy import Attention
from moeplan.solvers.rehoming import rehome
from tests.runtime.migrating.migrating_cases import (
    EXPERTS,
    LAW,
    LINKS,
    Answers,
    Moved,
    Moving,
    family_batch,
    family_model,
    free_of,
    run_cases,
)
from tests.runtime.migrating.migrating_reference import (
    counts,
    devices_of,
    given,
    homes,
    in_order,
    reference,
    starts,
    trained,
)
from tests.runtime.models.huggingface_models import FAMILIES
from tests.runtime.worlds import by_rank, close

EIGHT = Moving(batches=(2, 0, 1, 1, 2, 1, 0, 1), slots=(1,) * 8)
CASES = {
    "two nodes, predicted": Moving(predicted=True),
    "one node": Moving(nodes=1, predicted=True, seed=2),
    "top-1": Moving(top_k=1, predicted=True, seed=3),
    "top-3, padded right": Moving(top_k=3, padding="right", seed=4),
    "top-4, padded left, even": Moving(top_k=4, padding="left", method="even", predicted=True, seed=5),
    "holes": Moving(padding="holes", predicted=True, seed=6),
    "bottleneck": Moving(batches=(4, 4, 4, 4), method="bottleneck", predicted=True, seed=7),
    "paper": Moving(method="paper", seed=8),
    "one layer only": Moving(layers=(1,), predicted=True, seed=9),
    "no layer": Moving(layers=(), seed=10),
    "replicas, even": Moving(slots=(3, 3, 3, 3), rule="even", predicted=True, seed=11),
    "replicas, nearest": Moving(slots=(4, 2, 3, 3), seed=12),
    "unequal slots": Moving(slots=(1, 4, 0, 3), predicted=True, seed=13),
    "one sample": Moving(batches=(0, 1, 0, 0), seed=14),
    "joint": Moving(
        method="joint", law=LAW, links=LINKS, batches=(4, 4, 4, 4), predicted=True, padding="right", length=16, seed=25
    ),
    "joint, free": Moving(
        method="joint",
        law=replace(LAW, numbers="free", batches="padded"),
        links=LINKS,
        predicted=True,
        padding="left",
        length=16,
        seed=26,
    ),
    "LUFFY's paper": Moving(
        method="paper", law=replace(LAW, numbers="free"), links=LINKS, predicted=True, padding="right", seed=27
    ),
    "an empty rank": Moving(batches=(5, 0, 3, 1), predicted=True, seed=15),
    "no sample at all": Moving(batches=(0, 0, 0, 0), seed=16),
    "in chunks": Moving(forward=(3, 3, 3), predicted=True, padding="right", seed=17),
    "a window": Moving(window=3, seed=18),
    "dropout": Moving(dropping=True, predicted=True, padding="right", seed=22),
    "two ranks": Moving(batches=(2, 5), slots=(5, 4), rule="even", predicted=True, seed=23),
    "eight ranks": replace(EIGHT, predicted=True, padding="left", length=3, seed=24, forward=(2,) * 3),
    "a dense layer": Moving(dense=1, layers=(0, 1), predicted=True, seed=19),
}
TRAINED = Moving(
    steps=20, slots=(3, 3, 3, 3), rule="even", padding="right", forward=(2, 2, 2), top_k=3, method="even", seed=37
)
ByCase = dict[str, list[Moved]]
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[Answers]]:
    """One world a number of ranks for all its cases: answers by rank."""
    answers = {}
    for size in (2, 4, 8):
        cases = [case for case in CASES.values() if len(case.slots) == size]
        families = [*FAMILIES] if size == 2 and find_spec("transformers") else []
        work = cases, families, TRAINED if size == 4 else None
        answers[size] = by_rank(size, run_cases, work, timeout_s=240)
    return answers


@pytest.fixture(scope="module")
def answers(worlds: dict[int, list[Answers]]) -> ByCase:
    """By name of the case or family, then rank."""
    named: ByCase = {}
    for size, ranks in worlds.items():
        names = [name for name, case in CASES.items() if len(case.slots) == size]
        named.update(
            zip([*names, *FAMILIES], map(list, zip(*(rank.moved for rank in ranks), strict=True)), strict=False)
        )
    return named


@every_case
def test_logits_are_those_of_one_process_and_all_of_a_sample_follows_it(name: str, answers: ByCase) -> None:
    case = CASES[name]
    _, order = in_order(case, answers[name])
    assert close(np.concatenate([a.logits for a in answers[name]])[order], reference(case).logits)
    for kind, whole in enumerate((case.tokens(), case.mask(), case.upstream()[:, 0, 0].half())):
        rows = np.concatenate([answer.followed[kind] for answer in answers[name]])[order]
        assert rows.dtype == whole.numpy().dtype
        assert np.array_equal(rows, whole.numpy())


@every_case
def test_gradients_equal_those_of_a_single_process(name: str, answers: ByCase) -> None:
    case, placement = CASES[name], CASES[name].placement()
    routed = [ordinal for ordinal in range(3) if ordinal != case.dense]
    for weight, expected in reference(case).gradients.items():
        for rank, answer in enumerate(answers[name]):
            whole = expected
            if ".experts." in weight:
                layer = routed.index(int(weight.split(".")[1]))
                whole = expected[owners_of(placement.holds(layer)) == rank]
            assert np.abs(answer.gradients[weight] - whole).max(initial=0) <= 1e-12 * np.abs(expected).max(), weight


@every_case
def test_every_layer_routes_whole_samples_as_a_single_process_does(name: str, answers: ByCase) -> None:
    case = CASES[name]
    for layer in range(case.num_routed):
        seen = {}
        for rank, answer in enumerate(answers[name]):
            sample_T, position_T, ids_TK = answer.routed[layer]
            for sample in np.unique(sample_T).tolist():
                assert sample not in seen
                seen[sample] = rank
                assert position_T[sample_T == sample].tolist() == list(range((sample_T == sample).sum()))
                index = case.samples().tolist().index(sample)
                assert np.array_equal(ids_TK[sample_T == sample], reference(case).ids[index][layer])
        lengths = case.mask().sum(dim=1).tolist()
        assert set(seen) == {s for s, length in zip(case.samples().tolist(), lengths, strict=True) if length}


@every_case
def test_homes_are_those_that_the_policy_solves_for(name: str, answers: ByCase) -> None:
    case, home = CASES[name], starts(CASES[name])
    policy = case.policy()
    for layer, place in enumerate(homes(case, answers[name])[1:]):
        if layer in case.layers and len(home):
            copies, pairs = counts(case, layer, home)
            following = None
            if policy.predictor is not None and layer + 1 < case.num_routed:
                following = np.maximum(pairs @ np.rint(policy.predictor.per_pair[layer] * 2.0**20), 0) / 2**20
            attention = None
            if case.law is not None:
                tokens = case.mask().sum(dim=1).numpy()
                attention = Attention(case.law, tokens, tokens**2, layer + 1 < case.num_routed)
            home = rehome(
                case.method,
                copies,
                pairs.sum(axis=1),
                policy.cluster,
                attention=attention,
                next_copies=following,
                copy_bytes=policy.copy_bytes,
                bounded=False,
            ).device_of_sample
        known = place >= 0
        assert np.array_equal(place[known], home[known])


def test_samples_do_move_and_stay_where_the_policy_leaves_them(answers: ByCase) -> None:
    places = homes(CASES["two nodes, predicted"], answers["two nodes, predicted"])
    assert all((before != after).any() for before, after in itertools.pairwise(places))
    first, second, third, last = homes(CASES["one layer only"], answers["one layer only"])
    assert np.array_equal(first, second)
    assert (second != third).any()
    assert np.array_equal(third, last)
    assert np.array_equal(homes(CASES["no layer"], answers["no layer"])[-1], starts(CASES["no layer"]))


@every_case
def test_traffic_is_what_a_naive_recount_of_the_routing_gives(name: str, answers: ByCase) -> None:
    case, places = CASES[name], homes(CASES[name], answers[name])
    size = len(case.slots)
    sent, beside = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for layer in range(case.num_routed):
        known = np.flatnonzero(places[layer] >= 0)
        for sample in known.tolist():
            here, there = int(places[layer][sample]), int(places[layer + 1][sample])
            there = there if there >= 0 else here
            for visited in devices_of(case, layer, sample, here):
                sent[here] += len(visited - {here})
                beside[here] += len(visited - {here}) * (4 * (case.top_k + 2) + 8 * case.top_k)
                for device in visited - {there}:
                    sent[device] += 1
                    beside[device] += 4
        if layer in case.layers and case.padding != "holes":
            beside += np.bincount(places[layer], minlength=size) * (size - 1) * 4 * (size + EXPERTS)
    if case.law is not None:  # tokens and mask before the first layer
        np.add.at(beside, given(case), (starts(case) != given(case)) * case.length * 9)
    for rank, answer in enumerate(answers[name]):
        assert answer.traffic.copies == sent[rank]
        assert answer.traffic.payload_bytes == sent[rank] * 16 * 8
        if case.padding != "holes":
            assert answer.traffic.ids_bytes == beside[rank]
        assert isinstance(answer.traffic, Traffic)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_gives_what_it_gives_alone(family: str, answers: ByCase) -> None:
    pytest.importorskip("transformers")
    model, (tokens, mask, upstream) = family_model(family), family_batch()
    position = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(tokens, attention_mask=mask.long(), position_ids=position, use_cache=False).logits
    torch.autograd.backward((logits * upstream).sum())
    ranks = answers[family]
    order = np.argsort(np.concatenate([answer.samples for answer in ranks]))
    assert [len(answer.samples) for answer in ranks] != [2, 5]
    assert close(np.concatenate([a.logits for a in ranks])[order], (logits.detach() * mask[:, :, None]).numpy())
    names = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    for weight, parameter in model.named_parameters():
        whole = np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy()
        layer = next((layer for layer, name in enumerate(names) if weight.startswith(f"{name}.")), None)
        for answer in ranks:
            expected = whole if layer is None else whole[answer.followed[layer]]
            off = np.abs(answer.gradients[weight] - expected).max(initial=0)
            assert off <= 2e-6 * np.abs(whole).max(), weight  # its norms compute in float32


def test_losses_under_a_policy_replicas_and_degrees_are_those_of_one(worlds: dict[int, list[Answers]]) -> None:
    expected = trained(TRAINED)
    for rank in worlds[4]:
        np.testing.assert_allclose(rank.losses, expected, rtol=1e-9)
    assert expected[-1] < 0.95 * expected[0]


def test_weighed_losses_of_unequal_numbers_of_samples_are_the_mean_over_all_tokens(
    worlds: dict[int, list[Answers]],
) -> None:
    expected = trained(free_of(TRAINED), weighed=True)
    for rank in worlds[4]:
        np.testing.assert_allclose(rank.weighed[:3], expected[:3], rtol=1e-12)
        np.testing.assert_allclose(rank.weighed, expected, rtol=1e-9)


def test_what_cannot_be_carried_out_is_told_on_every_rank(worlds: dict[int, list[Answers]]) -> None:
    for rank in worlds[4]:
        assert rank.refusals == [
            "UsageError: samples of 4 to 5 positions on different ranks; pad them to one length",
            "UsageError: tokens, samples and mask of shapes [[2, 4], [2], [2, 3]]; expected [B, S], [B] and [B, S]",
            "UsageError: 3 rows to follow the 2 samples that the last forward took here",
        ]
