"""The cases that each rank runs alone, and the collectives on real ranks: right answers pass, wrong ones do not."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moeplan.profilers.cases import CASES
from moeplan.profilers.cases.attended import Attended
from moeplan.profilers.cases.attention import HEAD_SIZE, Attention
from moeplan.profilers.cases.expert_ffn import ExpertFfn
from moeplan.profilers.cases.fp8_rows import Decoded
from moeplan.profilers.cases.gemm import Gemm
from moeplan.profilers.cases.permutation import Permutation
from moeplan.profilers.cases.point_to_point import ALL_PAIRS, pairs
from moeplan.profilers.cases.router import Choice, Router
from moeplan.profilers.exchanged import Exchange
from moeplan.profilers.measurement import Size
from moeplan.profilers.world import World, run_world
from tests.builders import known
from tests.profilers.small_cases import by_halves

WORLD = World(1, 4, "cpu", ("host",) * 4, print)
SIZES: dict[str, list[Size]] = {
    "gemm": [{"m": m, "n": 24, "k": 256} for m in (1, 3, 64)],
    "expert_ffn": [
        {"tokens": 24, "experts": 3, "hidden": 48, "ffn": 80, "grouped": 0},
        {"tokens": 24, "experts": 3, "hidden": 48, "ffn": 80, "grouped": 1},
        {"tokens": 2, "experts": 2, "hidden": 64, "ffn": 16, "grouped": 1},
    ],
    "routed_block": [
        {"tokens": tokens, "experts": experts, "hidden": 48, "ffn": 40} for tokens, experts in ((8, 1), (60, 3))
    ],
    "attention": [
        {"batch": batch, "length": length, "hidden": 128, "calls": calls}
        for batch, length, calls in ((1, 1, 1), (2, 2, 2), (3, 33, 1), (5, 33, 2))
    ],
    "attended": [
        {"batch": batch, "length": length, "hidden": 128, "calls": calls}
        for batch, length, calls in ((1, 1, 1), (2, 2, 2), (3, 33, 1), (6, 33, 3))
    ],
    "router": [{"tokens": tokens, "hidden": 32, "experts": 16, "top_k": top_k} for tokens, top_k in ((2, 1), (40, 4))],
    "permutation": [{"tokens": tokens, "hidden": 8} for tokens in (2, 50)],
    "fp8_rows": [{"rows": rows, "hidden": 24} for rows in (1, 50)],
}
TRIED = [
    pytest.param(case, dtype, size, id=f"{name}-{dtype}-{index}")
    for name, sizes in SIZES.items()
    for case in (CASES[name],)
    for dtype in sorted({*case.dtypes("cpu"), *(("fp16", "bf16") if "bf16" in case.dtypes("cpu") else ())})
    for index, size in enumerate(sizes)
]
Judge = Callable[[Any], str | None]


def judged(name: str, size: Size, dtype: str = "fp32") -> tuple[Any, Any, Judge]:
    """Inputs and right output of a case, and its check."""
    case = CASES[name]
    inputs = case.prepare(size, dtype, WORLD)
    return inputs, case.run(inputs), lambda output: case.check(inputs, output, WORLD)


def test_every_case_of_a_rank_alone_is_tried() -> None:
    assert set(SIZES) == {name for name, case in CASES.items() if case.min_ranks == 1}


@pytest.mark.parametrize(("case", "dtype", "size"), TRIED)
def test_what_was_computed_is_right_and_stays_right_when_repeated(case: Any, dtype: str, size: Size) -> None:
    inputs = case.prepare(size, dtype, WORLD)
    for _ in range(2):
        assert case.check(inputs, case.run(inputs), WORLD) is None


@pytest.mark.parametrize(("case", "dtype", "size"), TRIED)
def test_what_was_never_computed_is_a_wrong_answer(case: Any, dtype: str, size: Size) -> None:
    inputs = case.prepare(size, dtype, WORLD)
    output = case.run(inputs)
    for value in (torch.nan, 0.0):
        assert case.check(inputs, _filled(output, value), WORLD) is not None


@pytest.mark.parametrize(("case", "dtype", "size"), TRIED)
def test_the_answer_of_another_rank_is_a_wrong_answer(case: Any, dtype: str, size: Size) -> None:
    other = World(2, 4, "cpu", WORLD.hosts, print)
    size = {**size, "tokens": 64} if case.name in ("router", "permutation") else size  # two tokens may go alike
    inputs, theirs = case.prepare(size, dtype, WORLD), case.run(case.prepare(size, dtype, other))
    assert case.check(inputs, theirs, WORLD) is not None


@pytest.mark.parametrize(("dtype", "shift"), [("fp32", 0.01), ("bf16", 4.0), ("fp16", 0.5), ("fp8", 2.0)])
def test_products_a_little_off_are_wrong_answers(dtype: str, shift: float) -> None:
    inputs, output, judge = judged("gemm", {"m": 64, "n": 64, "k": 256}, dtype)
    assert dtype != "fp8" or (inputs.a_mk.dtype, output.dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert judge(output) is None
    output[-1, 3] += shift
    assert str(judge(output)).startswith("off by")


@pytest.mark.parametrize(("capability", "has_fp8"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)])
def test_fp8_is_where_the_gpu_has_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_fp8: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert ("fp8" in Gemm().dtypes("cuda:0")) == has_fp8
    assert "fp8" not in Gemm().dtypes("cpu")


def test_the_usual_dtype_of_a_device_comes_first() -> None:
    for name in ("expert_ffn", "routed_block", "attention", "attended", "router"):
        assert CASES[name].dtypes("cpu")[0] == "fp32"
        assert CASES[name].dtypes("cuda:0")[0] == "bf16"


@pytest.mark.parametrize("size", SIZES["expert_ffn"][:2], ids=["looped", "grouped"])
def test_the_ffn_is_that_of_each_expert_in_turn(size: Size) -> None:
    inputs, output, judge = judged("expert_ffn", size)
    for expert in range(3):
        gate, up = (inputs.x[expert] @ inputs.w_in[expert][:, columns] for columns in (slice(80), slice(80, None)))
        torch.testing.assert_close(output[expert], (gate * torch.sigmoid(gate) * up) @ inputs.w_out[expert])
        wrong = output.clone()
        wrong[expert, -1, 5] += 0.1
        assert str(judge(wrong)).startswith(f"expert {expert} off by")
    assert judge(output.roll(1, 0)) is not None


def test_attention_that_sees_the_future_or_mixes_tokens_is_a_wrong_answer() -> None:
    inputs, output, judge = judged("attention", {"batch": 2, "length": 40, "hidden": 2 * HEAD_SIZE, "calls": 1})
    qkv = (inputs.x @ inputs.w_qkv).view(2, 40, 3, 2, HEAD_SIZE)
    q, k, v = (qkv[:, :, part].transpose(1, 2) for part in range(3))
    seeing = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) @ inputs.w_out
    assert str(judge(seeing)).startswith("token 0 off by")
    assert judge(output.roll(1, 1)) is not None
    shared = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    torch.testing.assert_close(output, shared @ inputs.w_out)


def test_attention_in_several_calls_gives_what_one_call_does_and_calls_as_often() -> None:
    inputs, output, judge = judged("attention", {"batch": 4, "length": 9, "hidden": HEAD_SIZE, "calls": 1})
    attend, seen = functional.scaled_dot_product_attention, list[int]()

    def counted(q: Any, *args: Any, **options: Any) -> Any:
        seen.append(len(q))
        return attend(q, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", counted)
        divided = CASES["attention"].run(dataclasses.replace(inputs, calls=3))
    torch.testing.assert_close(divided, output)
    assert judge(divided) is None
    assert seen == [2, 1, 1]


def test_moving_samples_that_see_the_future_or_each_other_are_a_wrong_answer() -> None:
    inputs, output, judge = judged("attended", {"batch": 2, "length": 40, "hidden": 2 * HEAD_SIZE, "calls": 1})
    w_qkv, w_out, turned = inputs.weights.w_qkv, inputs.weights.w_out, slow_rotation(inputs.position)
    q, k, v = ((inputs.x @ part).view(2, 40, 2, HEAD_SIZE) for part in w_qkv.split(2 * HEAD_SIZE, dim=1))
    q, k = (torch.einsum("bshc,scd->bshd", part, turned[:40]) for part in (q, k))
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    seeing, causal = (
        functional.scaled_dot_product_attention(q, k, v, is_causal=one).transpose(1, 2).reshape(80, -1) @ w_out
        for one in (False, True)
    )
    assert str(judge(seeing)).startswith("token 0 off by")
    assert judge(output.roll(1, 0)) is not None
    torch.testing.assert_close(output, causal)


def slow_rotation(position_T: torch.Tensor) -> torch.Tensor:
    """A matrix `[T, C, C]` for each position, which turns elements i and i + C / 2 by position / 10,000^(2 i / C)."""
    half, turned = HEAD_SIZE // 2, torch.zeros(len(position_T), HEAD_SIZE, HEAD_SIZE)
    for at, position in enumerate(position_T.tolist()):
        for one in range(half):
            angle = position / 10_000 ** (one / half)
            turned[at, one, one] = turned[at, one + half, one + half] = math.cos(angle)
            turned[at, one, one + half], turned[at, one + half, one] = math.sin(angle), -math.sin(angle)
    return turned


@pytest.mark.parametrize(
    ("calls", "expected"),
    [(1, [(9, 8)]), (2, [(8, 4), (10, 4)]), (4, [(6, 2), (8, 2), (10, 2), (12, 2)])],
)
def test_moving_samples_attend_in_one_call_for_each_length_around_that_of_the_size(
    calls: int, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, attend = list[tuple[int, int]](), functional.scaled_dot_product_attention

    def counting(q: Any, *args: Any, **options: Any) -> Any:
        counted.append((q.shape[2], len(q)))
        return attend(q, *args, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counting)
    inputs, output, judge = judged("attended", {"batch": 8, "length": 9, "hidden": 128, "calls": calls})
    assert sorted(counted) == expected
    assert judge(output) is None
    assert len(inputs.x) == sum(length * number for length, number in expected)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda weights, experts: (weights[:, 1:5], experts[:, 1:5]), "weights off by"),
        (lambda weights, experts: (weights[:, :4], experts[:, :4].roll(1, 1)), "weights off by"),
        (lambda weights, experts: (weights[:, :4].flip(1), experts[:, :4].flip(1)), "weights off by"),
        (lambda weights, experts: (weights[:, :4], experts[:, :1].expand(-1, 4)), "a token with one expert twice"),
        (lambda weights, experts: (weights[:, :4], experts[:, :4] + 16), "of 16"),
        (lambda weights, experts: (weights[:, :4], experts[:, :4] - 16), "of 16"),
        (lambda weights, experts: (weights[:, :4] * 1.001, experts[:, :4]), "weights off by"),
    ],
)
def test_experts_or_weights_other_than_the_largest_are_wrong_answers(damage: Any, told: str) -> None:
    inputs, _, judge = judged("router", SIZES["router"][1])
    weights, experts = (inputs.x @ inputs.weight).softmax(-1).sort(descending=True)
    assert judge(Choice(weights[:, :4], experts[:, :4])) is None
    assert told in str(judge(Choice(*damage(weights, experts))))


def test_tokens_out_of_order_or_not_restored_are_wrong_answers() -> None:
    inputs, (by_expert, restored), judge = judged("permutation", {"tokens": 50, "hidden": 8})
    assert torch.equal(by_expert, torch.stack([inputs.x[token] for token in inputs.order]))
    assert judge((by_expert.roll(1, 0), restored)) == "50 of 50 sorted rows differ"
    assert judge((by_expert, by_expert)) is not None
    restored = restored.clone()
    restored[7, 3] += 1
    assert judge((by_expert, restored)) == "1 of 50 restored rows differ"


def test_work_counts_the_multiply_adds_and_bytes_one_by_one() -> None:
    assert Gemm().work({"m": 3, "n": 5, "k": 7}, 1) == 3 * 5 * 7
    experts: Size = {"tokens": 6, "experts": 2, "hidden": 5, "ffn": 7, "grouped": 1}
    assert ExpertFfn().work(experts, 1) == 6 * (5 * 7 + 5 * 7 + 7 * 5)
    pairs = sum(1 for query in range(9) for key in range(9) if key <= query)
    assert Attention().work({"batch": 2, "length": 9, "hidden": 64}, 1) == 2 * (9 * 4 * 64 * 64 + pairs * 2 * 64)
    every = {one: sum(1 for query in range(one) for key in range(one) if key <= query) for one in range(7, 12)}
    for calls, lengths in ((1, (9, 9)), (2, (8, 10)), (3, (7, 9, 11))):
        size: Size = {"batch": len(lengths), "length": 9, "hidden": 64, "calls": calls}
        assert Attended().work(size, 1) == sum(one * 4 * 64 * 64 + every[one] * 2 * 64 for one in lengths)
    assert Router().work({"tokens": 3, "hidden": 4, "experts": 5, "top_k": 2}, 1) == 3 * 4 * 5
    assert Permutation().work({"tokens": 3, "hidden": 8}, 1) == 2 * 2 * 3 * torch.zeros(8).nbytes


def _filled(output: Any, value: float) -> Any:
    if isinstance(output, Choice):
        return Choice(torch.full_like(output.weights, value), torch.zeros_like(output.experts))
    if isinstance(output, Tensor):
        return torch.full_like(output, value)
    if isinstance(output, Decoded):
        return Decoded(output.rows, torch.full_like(output.x, value))
    return tuple(torch.full_like(part, value) for part in output)


COLLECTIVES: dict[str, Size] = {
    "all_to_all": {"bytes": 3840},
    "uneven_all_to_all": {"bytes": 5000, "sigma_percent": 100},
    "all_gather": {"bytes": 3840},
    "all_reduce": {"bytes": 3840},
    "reduce_scatter": {"bytes": 3840},
    "point_to_point": {"bytes": 777, "first": 0, "second": 1},
}
NUM_RANKS = 5  # sides of 3 and 2


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What one rank's check said; `corrupted` by the kind of damage."""

    case: str
    dtype: str
    size: int
    never_run: str | None
    right: str | None
    after_repeats: str | None
    corrupted: dict[str, str | None]


def verdicts(world: World, _payload: None) -> list[Verdicts]:
    """The checks of every collective on all ranks, and on the odd and the even ones apart."""
    sides = [[rank for rank in range(world.size) if rank % 2 == odd] for odd in (0, 1)]
    groups, odd = [dist.new_group(side) for side in sides], world.rank % 2
    size, rank = len(sides[odd]), sides[odd].index(world.rank)
    inside = dataclasses.replace(world, rank=rank, size=size, hosts=world.hosts[:size], group=groups[odd])
    places = [(place, name) for place in (world, inside) for name in COLLECTIVES]
    places.remove((inside, "point_to_point"))
    return [_verdicts(place, name, dtype) for place, name in places for dtype in CASES[name].dtypes("cpu")]


def _verdicts(world: World, name: str, dtype: str) -> Verdicts:
    case = CASES[name]
    inputs = case.prepare(COLLECTIVES[name], dtype, world)
    never_run = case.check(inputs, getattr(inputs, "received", getattr(inputs, "result", None)), world)
    right = case.check(inputs, case.run(inputs), world)
    for _ in range(3):
        output = case.run(inputs)
    after_repeats = case.check(inputs, output, world)
    corrupted = {kind: case.check(inputs, wrong, world) for kind, wrong in _corruptions(output)}
    return Verdicts(name, dtype, world.size, never_run, right, after_repeats, corrupted)


def _corruptions(output: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    if output is None:
        return
    for kind, position in (("first element", 0), ("last element", -1)):
        wrong = output.clone()
        wrong[position] += 1
        yield kind, wrong
    yield "shifted", output.roll(1)
    yield "halves swapped", output.roll(len(output) // 2)


@pytest.fixture(scope="module")
def by_rank() -> list[list[Verdicts]]:
    return known(run_world(NUM_RANKS, verdicts))


@pytest.fixture(scope="module")
def told(by_rank: list[list[Verdicts]]) -> list[Verdicts]:
    """Of the ranks that took part."""
    return [verdict for rank in by_rank for verdict in rank if verdict.corrupted]


def test_every_collective_is_tried_in_every_dtype_and_on_both_kinds_of_group(by_rank: list[list[Verdicts]]) -> None:
    for rank, found in enumerate(by_rank):
        assert {one.case for one in found} == set(COLLECTIVES)
        assert {one.size for one in found if one.case != "point_to_point"} == {NUM_RANKS, 2 if rank % 2 else 3}
        for case in ("all_reduce", "reduce_scatter"):
            assert {one.dtype for one in found if one.case == case} == {"fp32", "bf16", "fp16"}


def test_an_exchange_is_right_also_when_repeated_and_one_that_never_ran_is_wrong(told: list[Verdicts]) -> None:
    assert not [one for one in told if one.right or one.after_repeats or not one.never_run]
    of_pairs = {one.never_run for one in told if one.case == "point_to_point"}
    assert of_pairs == {f"777 of 777 bytes from rank {peer} differ" for peer in (0, 1)}


def test_one_wrong_element_and_elements_in_wrong_places_are_wrong_answers(told: list[Verdicts]) -> None:
    for one in told:
        assert all(one.corrupted.values()), one
        for kind in ("first element", "last element"):
            assert str(one.corrupted[kind]).startswith("1 of "), one


def test_ranks_outside_a_pair_wait_and_have_nothing_to_say(by_rank: list[list[Verdicts]]) -> None:
    silent = [(rank, one) for rank, found in enumerate(by_rank) for one in found if not one.corrupted]
    assert [rank for rank, _ in silent] == [2, 3, 4]
    assert not [one for _, one in silent if one.case != "point_to_point" or one.never_run or one.right]


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_all_pairs_of_up_to_sixteen_ranks_are_measured(num_ranks: int) -> None:
    assert pairs(num_ranks) == list(combinations(range(num_ranks), 2))


@pytest.mark.parametrize("num_ranks", [17, 64, 100, 512, 4096])
def test_of_many_ranks_some_pairs_of_every_distance_are_measured(num_ranks: int) -> None:
    found = pairs(num_ranks)
    assert len(set(found)) == len(found) <= 2 * ALL_PAIRS
    assert all(0 <= first < second < num_ranks for first, second in found)
    inside = [pair for pair in found if pair[0] // 8 == pair[1] // 8]
    assert min(len(inside), len(found) - len(inside)) >= 16
    assert max(second for _, second in found) >= num_ranks - num_ranks // 8


def gathered_on_nodes(world: World, _payload: None) -> tuple[int, str | None]:
    """The devices a node that a gather goes by, and what is wrong with what it gives."""
    case = CASES["all_gather"]
    inputs = case.prepare(COLLECTIVES["all_gather"], "uint8", world)
    with mock.patch.object(Exchange, "gather", wraps=Exchange.gather) as gather:
        output = case.run(inputs)
    return gather.call_args.args[3], case.check(inputs, output, world)


def test_a_gather_is_measured_on_the_nodes_that_there_are() -> None:
    assert run_world(4, gathered_on_nodes, host_of=by_halves) == [(2, None)] * 4
