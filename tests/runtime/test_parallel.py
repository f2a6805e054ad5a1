"""The expert-parallel model on real gloo processes, against the same model in one process and naive recounts."""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moeplan.errors import UsageError
from moeplan.runtime import parallelize
from moeplan.runtime.decisions import ChunkShares
from moeplan.runtime.engine.traffic import Traffic
from moeplan.runtime.engine.watch import watch
from tests.runtime.rank_cases import Answer, Case, answer, run_cases, run_pair
from tests.runtime.worlds import Watched, by_case, by_rank, close

NO_TIE = 1e-6  # between the gates of the experts chosen, and the next
EVEN_4 = (2, 2, 2, 2)
BATCHES = (2, 3, 1, 2)
SHAPES = {
    "random placement": Case("", EVEN_4, BATCHES),
    "two nodes": Case("", EVEN_4, BATCHES, nodes=2, seed=1),
    "top-1": Case("", EVEN_4, BATCHES, top_k=1, seed=2),
    "top-4": Case("", EVEN_4, BATCHES, top_k=4, seed=3),
    "replicas, nearest": Case("", (3, 3, 3, 3), BATCHES, nodes=2, seed=4),
    "replicas, even": Case("", (3, 3, 3, 3), BATCHES, nodes=2, rule="even", top_k=4, seed=5),
    "replicas, even, default samples": Case("", (4, 4, 4, 4), BATCHES, rule="even", default_samples=True, seed=6),
    "unequal slots": Case("", (1, 4, 2, 1), BATCHES, seed=7),
    "unequal slots with replicas": Case("", (8, 1, 3, 2), BATCHES, nodes=2, seed=8),
    "a device without slots": Case("", (4, 0, 3, 1), BATCHES, seed=9),
    "everything on one device": Case("", (0, 8, 0, 0), BATCHES, seed=10),
    "one token": Case("", EVEN_4, (0, 1, 0, 0), length=1, seed=11),
    "an empty rank": Case("", EVEN_4, (3, 0, 4, 1), seed=12),
    "no token at all": Case("", EVEN_4, (0, 0, 0, 0), seed=13),
    "float32": Case("", EVEN_4, BATCHES, dtype=torch.float32, seed=14),
    "every expert": Case("", EVEN_4, BATCHES, top_k=8, seed=15),
}
ALONE = [Case(how, (8,), (3,), gradients=how == "standard", seed=22) for how in ("standard", "coherent")]
ALONE.append(replace(ALONE[0], forward=(2, 4, 2), backward=(4, 2, 3)))
TRAINED = ["random placement", "top-4", "replicas, nearest", "replicas, even", "unequal slots with replicas"]
TRAINED += ["unequal slots", "a device without slots", "an empty rank", "one token", "every expert"]
UNEVEN = ChunkShares(forward=((0.3, 0.7), (1.0,), (0.5, 0.25, 0.25)), backward=((0.3, 0.7), (0.2, 0.8), (1.0,)))
PIPELINES = {
    "two chunks": replace(SHAPES["random placement"], forward=(2, 2, 2)),
    "other degrees a layer and pass": replace(SHAPES["top-4"], forward=(1, 2, 3), backward=(4, 1, 2)),
    "more chunks than tokens": replace(SHAPES["one token"], forward=(4, 4, 4), backward=(2, 8, 1)),
    "an empty rank in chunks": replace(SHAPES["an empty rank"], forward=(8, 2, 3), backward=(1, 4, 5)),
    "unequal shares": replace(SHAPES["unequal slots"], forward=(2, 1, 3), backward=(2, 2, 1), shares=UNEVEN),
    "replicas in chunks": replace(SHAPES["replicas, even"], forward=(2, 4, 1), backward=(3, 1, 2)),
}
CASES = [
    *(replace(shape, dispatch=dispatch) for shape in SHAPES.values() for dispatch in ("standard", "coherent")),
    *(replace(SHAPES[name], dispatch="standard", gradients=True) for name in TRAINED),
    *(replace(shape, dispatch="standard", gradients=True) for shape in PIPELINES.values()),
]
IDS = [f"{name}, {dispatch}" for name in SHAPES for dispatch in ("standard", "coherent")]
IDS += [f"{name}, training" for name in (*TRAINED, *PIPELINES)]
SHARED = Case("standard", (5, 3), (3, 2), seed=20, length=5, gradients=True)
PAIR = [replace(SHARED, share_of_gradients=how) for how in ("mean", "sum")]
Pair = list[tuple[list[Answer], dict[str, str]]]  # answers to `PAIR` and refusals, by rank
every_case = pytest.mark.parametrize("index", range(len(CASES)), ids=IDS)


@dataclass(frozen=True)
class Reference:
    """The single process: logits, routing `[T, L, K]`, the model with its gradients; no near ties."""

    logits: np.ndarray
    ids: np.ndarray
    gradients: dict[str, np.ndarray]


@functools.cache
def reference(case: Case) -> Reference:
    model, tokens = case.model(), case.tokens()
    watched = Watched(model)
    if not len(tokens):
        shape = (0, case.num_layers, case.top_k)
        return Reference(np.zeros((0, case.length, 50)), np.zeros(shape, dtype=np.int64), {})
    logits = model(tokens)
    assert watched.gap > NO_TIE
    (logits * case.upstream()).sum().backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return Reference(logits.detach().numpy(), torch.stack(watched.ids, dim=1).numpy(), gradients)


@pytest.fixture(scope="module")
def answers() -> list[list[Answer]]:
    """One world of 4 ranks for all cases: answers by case, then rank."""
    return by_case(4, run_cases, CASES)


@every_case
def test_logits_routing_and_traffic_are_those_of_a_single_process(index: int, answers: list[list[Answer]]) -> None:
    case, ranks = CASES[index], answers[index]
    assert [len(answer.logits) for answer in ranks] == list(case.batches)
    rtol = 1e-12 if case.dtype is torch.float64 else 1e-5
    assert close(np.concatenate([a.logits for a in ranks]), reference(case).logits, rtol)
    for layer in range(case.num_layers):
        sample, position, ids = map(np.concatenate, zip(*(a.routed[layer] for a in ranks), strict=True))
        order = np.lexsort((position, sample))
        assert np.array_equal(sample[order], np.repeat(case.samples().numpy(), case.length))
        assert np.array_equal(position[order], np.tile(np.arange(case.length), sum(case.batches)))
        assert np.array_equal(ids[order], reference(case).ids[:, layer])
    assert [answer.traffic for answer in ranks] == recount(case, reference(case).ids)


@pytest.mark.parametrize("index", [i for i, case in enumerate(CASES) if case.gradients], ids=[*TRAINED, *PIPELINES])
def test_gradients_summed_over_ranks_equal_those_of_a_single_process(index: int, answers: list[list[Answer]]) -> None:
    case = CASES[index]
    for name, expected in reference(case).gradients.items():
        assert close(summed_gradient(case, answers[index], name), expected)


def test_mean_gradients_of_experts_are_sums_over_ranks(pair: Pair) -> None:
    for (mean, total), _ in pair:
        for name, summed in total.gradients.items():
            assert close((2 if ".experts." in name else 1) * mean.gradients[name], summed)


def test_a_rank_keeps_its_own_experts_only(answers: list[list[Answer]]) -> None:
    index = IDS.index("unequal slots, standard")
    whole = sum(p.numel() for p in CASES[index].model().parameters())
    expert = 2 * 16 * 12
    for rank, slots in enumerate(CASES[index].slots):
        assert answers[index][rank].num_parameters == whole - CASES[index].num_layers * (8 - slots) * expert


@pytest.fixture(scope="module")
def pair() -> Pair:
    """One world of 2 ranks: answers to `PAIR` and refusals, by rank."""
    return by_rank(2, run_pair, PAIR)


@pytest.mark.parametrize(
    ("attempt", "told"),
    [
        ("world size", "MismatchError: rank 0: 2 ranks for a plan of 4 devices; start one rank a device"),
        ("layers", "MismatchError: rank 0: the model has 2 MoE layers, the plan 3"),
        ("experts", "MismatchError: rank 0: layer 0 of the model has 16 experts, the plan's model 8"),
        ("top-k", "MismatchError: rank 0: layer 0 of the model has 3 experts per token, the plan's model 2"),
        ("hidden size", "MismatchError: rank 0: layer 0 of the model has 32 hidden elements, the plan's model 16"),
        ("no sample policy", "UsageError: rank 0: dispatch model 'migrating' for a plan that decides nothing"),
        ("degrees in coherent", "UsageError: rank 0: pipeline beside coherent dispatch"),
        ("other plan on rank 1", "MismatchError: rank 1 holds plan "),
        ("other dispatch on rank 1", "MismatchError: rank 1 holds plan "),
        ("wrong model on rank 1", "MismatchError: rank 1: the model has 2 MoE layers, the plan 3"),
        ("migrating", "UsageError: rank 0: dispatch model 'migrating'"),
        ("not such a model", "UsageError: rank 0: Linear has no routed blocks"),
        ("parallelized before", "UsageError: rank 0: MoELanguageModel has no routed blocks"),
        ("unchanged", "UsageError: whole"),
        ("coherent training", "UsageError: dispatch model 'coherent' in training"),
    ],
)
def test_what_does_not_belong_together_is_refused(attempt: str, told: str, pair: Pair) -> None:
    for _, refusals in pair:
        assert refusals[attempt].startswith(told)
        assert "\n" not in refusals[attempt]


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    """This process as the only rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    watch().close()
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("case", ALONE, ids=["standard", "coherent", "degrees"])
def test_one_rank_gives_what_no_group_gives_and_sends_nothing(case: Case) -> None:
    alone = answer(0, case)
    assert close(alone.logits, reference(case).logits)
    assert alone.traffic == replace(recount(case, reference(case).ids)[0], ids_bytes=0)
    assert alone.traffic.copies == 0
    for name, gradient in alone.gradients.items():
        assert close(gradient, summed_gradient(case, [alone], name))
        assert close(summed_gradient(case, [alone], name), reference(case).gradients[name])


def test_without_a_process_group_parallelize_says_how_to_get_one() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        parallelize(SHARED.model(), SHARED.plan())


def summed_gradient(case: Case, ranks: list[Answer], name: str) -> np.ndarray:
    if ".experts." not in name:
        summed: np.ndarray = np.add.reduce([a.gradients[name] for a in ranks])
        return summed
    layer = int(name.split(".")[1])
    owned = [answer.owned[layer] for answer in ranks]
    assert sorted(itertools.chain(*owned)) == list(range(case.num_experts))  # each has one owner
    rows = np.concatenate([answer.gradients[name] for answer in ranks])
    gathered: np.ndarray = rows[np.argsort(list(itertools.chain(*owned)))]
    return gathered


@functools.cache
def holders(case: Case, layer: int) -> dict[int, list[int]]:
    placement = case.placement()
    slots = list(zip(placement.device_of_slot.tolist(), placement.physical_to_logical[layer].tolist(), strict=True))
    return {expert: sorted(device for device, held in slots if held == expert) for expert in range(case.num_experts)}


def device_of(case: Case, layer: int, expert: int, home: int, turn: int) -> int:
    """The replica rule, in words: own device, own node, anywhere; or anywhere at once."""
    offered, size = holders(case, layer)[expert], len(case.slots) // case.nodes
    if case.rule == "nearest":
        near = [device for device in offered if device // size == home // size]
        offered = [home] if home in offered else near or offered
    return offered[turn % len(offered)]


def journeys(case: Case, ids: np.ndarray) -> Iterator[tuple[int, list[tuple[int, list[int], int]]]]:
    """Each token's source rank and, by layer, (old home, devices of its experts, new home)."""
    source = [rank for rank, batch in enumerate(case.batches) for _ in range(batch * case.length)]
    samples = case.samples().tolist()
    for token, start in enumerate(source):
        turn = samples[token // case.length] + token % case.length
        home, stops = start, []
        for layer in range(case.num_layers):
            devices = [device_of(case, layer, int(e), home, turn) for e in ids[token, layer]]
            new = devices[0] if case.dispatch == "coherent" else home
            stops.append((home, devices, new))
            home = new
        yield start, stops


def recount(case: Case, ids: np.ndarray) -> list[Traffic]:
    """What each rank sends and computes, token by token with sets."""
    size, itemsize = len(case.slots), case.dtype.itemsize
    counters: list[Counter[int]] = [Counter() for _ in range(4)]
    dispatched, combined, returned, held = counters
    loads: Counter[tuple[int, int]] = Counter()
    for start, stops in journeys(case, ids):
        for layer, (home, devices, new) in enumerate(stops):
            dispatched[home] += len(set(devices) - {home})
            combined.update(set(devices) - {new})
            loads.update((device, layer) for device in devices)
            held[home] += 1
        returned[new] += new != start
    coherent, total = case.dispatch == "coherent", len(ids) * case.num_layers
    header = (case.top_k + 2 * coherent) * 4 + case.top_k * itemsize
    return [
        Traffic(
            copies=dispatched[rank] + combined[rank],
            payload_bytes=(dispatched[rank] + combined[rank]) * 16 * itemsize,
            ids_bytes=dispatched[rank] * header + coherent * 4 * (combined[rank] + (size - 1) * held[rank]),
            kv_bytes=coherent * (total - held[rank]) * case.config.kv_size * itemsize,
            return_bytes=coherent * returned[rank] * (16 * itemsize + 4),
            loads=tuple(loads[rank, layer] for layer in range(case.num_layers)),
        )
        for rank in range(size)
    ]
