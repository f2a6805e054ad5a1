"""The cases each rank runs alone: right answers pass, wrong ones do not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moeplan.profilers.cases import CASES
from moeplan.profilers.cases.attention import HEAD_SIZE, Attention
from moeplan.profilers.cases.expert_ffn import ExpertFfn
from moeplan.profilers.cases.gemm import Gemm
from moeplan.profilers.cases.permutation import Permutation
from moeplan.profilers.cases.precision import deviation
from moeplan.profilers.cases.router import Choice, Router
from moeplan.profilers.measurement import Size
from moeplan.profilers.world import World

WORLD = World(1, 4, "cpu", ("host",) * 4, print)
SIZES: dict[str, list[Size]] = {
    "gemm": [{"m": m, "n": 24, "k": 256} for m in (1, 3, 64)],
    "expert_ffn": [
        {"tokens": 24, "experts": 3, "hidden": 48, "ffn": 80, "grouped": 0},
        {"tokens": 24, "experts": 3, "hidden": 48, "ffn": 80, "grouped": 1},
        {"tokens": 2, "experts": 2, "hidden": 64, "ffn": 16, "grouped": 1},
    ],
    "attention": [{"batch": batch, "length": length, "hidden": 128} for batch, length in ((1, 1), (2, 2), (3, 33))],
    "router": [{"tokens": tokens, "hidden": 32, "experts": 16, "top_k": top_k} for tokens, top_k in ((2, 1), (40, 4))],
    "permutation": [{"tokens": tokens, "hidden": 8} for tokens in (2, 50)],
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


def test_products_a_little_off_are_wrong_answers() -> None:
    for dtype, shift in (("fp32", 0.01), ("bf16", 4.0), ("fp16", 0.5)):
        _, output, judge = judged("gemm", {"m": 64, "n": 8, "k": 256}, dtype)
        output[-1, 3] += shift
        assert str(judge(output)).startswith("off by")


def test_fp8_products_are_right_in_bf16_and_wrong_when_a_little_off() -> None:
    inputs, output, judge = judged("gemm", {"m": 16, "n": 64, "k": 128}, "fp8")
    assert (inputs.a_mk.dtype, output.dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert judge(output) is None
    output[-1, 3] += 2
    assert str(judge(output)).startswith("off by")


@pytest.mark.parametrize(("capability", "has_fp8"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)])
def test_fp8_is_where_the_gpu_has_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_fp8: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert ("fp8" in Gemm().dtypes("cuda:0")) == has_fp8
    assert "fp8" not in Gemm().dtypes("cpu")


def test_the_usual_dtype_of_a_device_comes_first() -> None:
    for name in ("expert_ffn", "attention", "router"):
        assert CASES[name].dtypes("cpu")[0] == "fp32"
        assert CASES[name].dtypes("cuda:0")[0] == "bf16"


def test_the_ffn_is_that_of_each_expert_in_turn() -> None:
    inputs, output, judge = judged("expert_ffn", SIZES["expert_ffn"][0])
    for expert in range(3):
        gate, up = (inputs.x[expert] @ inputs.w_in[expert][:, columns] for columns in (slice(80), slice(80, None)))
        expected = (gate * torch.sigmoid(gate) * up) @ inputs.w_out[expert]
        torch.testing.assert_close(output[expert], expected)
        wrong = output.clone()
        wrong[expert, -1, 5] += 0.1
        assert str(judge(wrong)).startswith(f"expert {expert} off by")
    assert judge(output.roll(1, 0)) is not None


def test_grouped_and_looped_experts_give_the_same() -> None:
    looped, grouped = (judged("expert_ffn", size)[1] for size in SIZES["expert_ffn"][:2])
    torch.testing.assert_close(looped, grouped)


def test_attention_that_sees_the_future_or_mixes_tokens_is_a_wrong_answer() -> None:
    inputs, output, judge = judged("attention", {"batch": 2, "length": 40, "hidden": 2 * HEAD_SIZE})
    qkv = (inputs.x @ inputs.w_qkv).view(2, 40, 3, 2, HEAD_SIZE)
    q, k, v = (qkv[:, :, part].transpose(1, 2) for part in range(3))
    seeing = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) @ inputs.w_out
    assert str(judge(seeing)).startswith("token 0 off by")
    assert judge(output.roll(1, 1)) is not None
    shared = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    torch.testing.assert_close(output, shared @ inputs.w_out)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda weights, experts: (weights, experts.roll(1, 1)), "weights off by"),
        (lambda weights, experts: (weights.flip(1), experts.flip(1)), "weights off by"),
        (lambda weights, experts: (weights, experts[:, :1].expand(-1, 4)), "a token with one expert twice"),
        (lambda weights, experts: (weights, experts + 16), "of 16"),
        (lambda weights, experts: (weights, experts - 16), "of 16"),
        (lambda weights, experts: (weights * 1.001, experts), "weights off by"),
    ],
)
def test_experts_or_weights_other_than_the_largest_are_wrong_answers(damage: Any, told: str) -> None:
    _, output, judge = judged("router", SIZES["router"][1])
    assert told in str(judge(Choice(*damage(output.weights, output.experts))))


def test_the_experts_next_to_the_chosen_ones_are_a_wrong_answer() -> None:
    inputs, _, judge = judged("router", SIZES["router"][1])
    share = (inputs.x @ inputs.weight).softmax(-1)
    weights, experts = share.sort(descending=True)
    assert judge(Choice(weights[:, :4], experts[:, :4])) is None
    assert "weights off by" in str(judge(Choice(weights[:, 1:5], experts[:, 1:5])))


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
    tokens, hidden, ffn = 6, 5, 7
    assert ExpertFfn().work({"tokens": 6, "experts": 2, "hidden": 5, "ffn": 7, "grouped": 1}, 1) == (
        tokens * (hidden * ffn + hidden * ffn + ffn * hidden)
    )
    pairs = sum(1 for query in range(9) for key in range(9) if key <= query)
    assert Attention().work({"batch": 2, "length": 9, "hidden": 64}, 1) == 2 * (9 * 4 * 64 * 64 + pairs * 2 * 64)
    assert Router().work({"tokens": 3, "hidden": 4, "experts": 5, "top_k": 2}, 1) == 3 * 4 * 5
    row = torch.zeros(8, dtype=torch.float32)
    assert Permutation().work({"tokens": 3, "hidden": 8}, 1) == 2 * 2 * 3 * row.nbytes


def test_a_deviation_of_more_than_rounding_is_told_with_its_row() -> None:
    exact = torch.tensor([[1.0, 2.0], [100.0, 200.0]], dtype=torch.float64)
    close = exact.float() * (1 + 2e-7)
    assert deviation(close, exact, roundings=1, terms=1) is None
    for wrong in ([[1.0, 2.0001], [100.0, 200.0]], [[1.0, torch.nan], [100.0, 200.0]]):
        assert str(deviation(torch.tensor(wrong), exact, roundings=1, terms=1)).startswith("off by")


def _filled(output: Any, value: float) -> Any:
    if isinstance(output, Choice):
        return Choice(torch.full_like(output.weights, value), torch.zeros_like(output.experts))
    if isinstance(output, Tensor):
        return torch.full_like(output, value)
    return tuple(torch.full_like(part, value) for part in output)
