"""fp8 rows: the codec by hand, and four real processes held against an emulation in one process."""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn
from torch.nn import functional

from moeplan.errors import InputError
from moeplan.planner.demo.model import MoEBlock, load_embedded
from moeplan.planner.demo.text import other_text, record_text, samples
from moeplan.planner.evaluate.evaluate import evaluate
from moeplan.planner.evaluate.journey import Contender, journey_of
from moeplan.profilers.encoded import decoded, encoded
from moeplan.runtime.wire import copy_bytes
from moeplan.traces.schema import TokenBatch
from tests.planner.makers import scene_of, stored_tokens
from tests.runtime.condensation_reference import condensed, gradients_of
from tests.runtime.wire_cases import CASES, COARSE, HIDDEN, PLAIN, Answer, Wired, run_wired
from tests.runtime.wire_reference import Travelled, by_hand
from tests.runtime.worlds import by_rank, close, summed

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Finite in float32 and not near its end, where a scale times 448 is none.
rows = arrays.arrays(
    np.float64,
    st.tuples(st.integers(0, 4), st.integers(1, 9)),
    elements=st.floats(-1e4, 1e4) | st.floats(-1e-36, 1e-36) | st.floats(-1e36, 1e36),
)


def arrived(x: torch.Tensor) -> torch.Tensor:
    """Rows after their way to another device."""
    return decoded(encoded(x), x.dtype)


@given(rows, st.sampled_from(DTYPES))
def test_an_element_errs_by_a_sixteenth_of_itself_or_a_thousandth_of_its_rows_scale(
    row: np.ndarray, dtype: torch.dtype
) -> None:
    x = torch.from_numpy(row).to(dtype)
    if not x.isfinite().all():  # too large for float16
        return
    exact, found = x.double().numpy(), arrived(x).double().numpy()
    scale = np.maximum(np.abs(exact).max(axis=1, initial=0, keepdims=True) / 448, np.finfo(np.float32).tiny)
    rounding = torch.finfo(dtype).eps * np.abs(exact) + torch.finfo(dtype).tiny
    bound = np.maximum(np.abs(exact) / 16, scale / 1024) * (1 + 1e-6) + rounding
    assert (np.abs(found - exact) <= bound).all()


@given(rows)
def test_rows_arrive_as_they_do_by_hand(row: np.ndarray) -> None:
    expected = np.array([by_hand(one) for one in row]).reshape(row.shape)
    assert np.array_equal(arrived(torch.from_numpy(row)).numpy(), expected)


@given(rows)
def test_a_row_that_arrived_arrives_again_as_it_is(row: np.ndarray) -> None:
    once = arrived(torch.from_numpy(row).float())
    assert torch.equal(arrived(once), once)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_zeros_stays_one_and_what_is_not_finite_fills_its_row_alone(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, 0, 0], [1, -2, 3], [1, float("inf"), 2], [-float("inf"), 0, 1], [float("nan"), 1, 1]])
    found = arrived(x.to(dtype))
    assert torch.equal(found[0], torch.zeros(3, dtype=dtype))
    assert torch.equal(found[1].isfinite(), torch.ones(3, dtype=torch.bool))
    assert found[2:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_takes_a_byte_for_each_element_and_four(dtype: torch.dtype) -> None:
    sent = encoded(torch.randn(3, HIDDEN).to(dtype))
    assert sent.dtype is torch.uint8
    assert sent.shape == (3, copy_bytes(PLAIN.plan().model, "fp8"))


@functools.cache
def answers() -> list[Answer]:
    """By rank."""
    return by_rank(4, run_wired, timeout_s=300)


def ranks(name: str) -> list[Wired]:
    """Of a case."""
    return [answer.cases[name] for answer in answers()]


@functools.cache
def emulated(name: str) -> tuple[np.ndarray, dict[str, np.ndarray], list[int]]:
    """Logits, gradients and rows sent by rank of a case in one process."""
    case, decided = CASES[name]
    apart = case.capacity_factor is not None
    travelled = Travelled.apply
    model, layers = condensed(case, medoid=decided.get("medoid", False), travelled=travelled, apart=apart)
    for layer in layers:
        layer.reach = decided.get("tau")
    logits = model(case.tokens())
    (logits * case.upstream()).sum().backward()
    sent_D = np.sum([layer.seen.sent for layer in layers], axis=0)
    return logits.detach().numpy(), gradients_of(model), sent_D.tolist()


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_an_emulation_in_one_process(name: str) -> None:
    logits, gradients, _ = emulated(name)
    assert close(np.concatenate([rank.logits for rank in ranks(name)]), logits)
    for parameter, expected in gradients.items():
        assert close(summed(ranks(name), parameter), expected), parameter


@pytest.mark.parametrize("name", CASES | COARSE)
def test_results_are_others_than_without_but_near(name: str) -> None:
    expected, found = (np.concatenate([of(rank) for rank in ranks(name)]) for of in (_bare, lambda one: one.logits))
    far = np.median(np.abs(found - expected)) / np.median(np.abs(expected))  # few tokens choose other experts then
    assert far < 0.05
    assert (far > 1e-4) == (name != "every expert everywhere")


def _bare(rank: Wired) -> np.ndarray:
    return rank.bare[0]


@pytest.mark.parametrize("name", CASES | COARSE)
def test_as_many_rows_travel_as_without_each_of_a_byte_for_each_element_and_four(name: str) -> None:
    case, _ = (CASES | COARSE)[name]
    for rank in ranks(name):
        mixed = rank.amp[1]
        assert rank.traffic.payload_bytes == rank.traffic.copies * (HIDDEN + 4)
        assert mixed.payload_bytes == mixed.copies * (HIDDEN + 4)
        assert rank.bare[2].payload_bytes == rank.bare[2].copies * HIDDEN * case.dtype.itemsize


@pytest.mark.parametrize("name", CASES)
def test_rows_sent_are_those_of_the_emulation(name: str) -> None:
    case, sent_D = CASES[name][0], emulated(name)[2]
    copies = [rank.traffic.copies for rank in ranks(name)]
    if case.capacity_factor is None:  # whose buffers travel whole
        assert sum(copies) == 2 * sum(sent_D)
    assert all(copies)


@pytest.mark.parametrize("name", ["plain", "replicas in chunks", "one expert a token", "an empty rank", "bfloat16"])
def test_bytes_sent_are_those_that_the_planner_predicts(name: str, tmp_path: Path) -> None:
    case, by_rank = (CASES | COARSE)[name][0], ranks(name)
    plan = case.plan(wire="fp8")
    spec, layers = replace(plan.model, dtype_bytes=case.dtype.itemsize), range(case.num_layers)
    sample, position = (np.concatenate([one.routed[0][column] for one in by_rank]) for column in (0, 1))
    ids = np.stack([np.concatenate([one.routed[layer][2] for one in by_rank]) for layer in layers], axis=1)
    source = np.repeat(np.arange(4), [len(one.routed[0][0]) for one in by_rank])
    batch = TokenBatch(
        step=np.zeros(len(sample), np.int32),
        sample=sample,
        position=position.astype(np.int32),
        source_rank=source.astype(np.int32),
        phase=np.zeros(len(sample), np.int8),
        ids=ids.astype(np.uint16),
    )
    trace = stored_tokens(tmp_path, spec, batch)
    journey = journey_of(plan, lambda _: b"")
    (figures,) = evaluate(scene_of(trace, plan.cluster), [Contender("plan", journey)]).judged.values()
    sent = sum(one.traffic.payload_bytes for one in by_rank)
    assert figures.value["intra_bytes"] + figures.value["inter_bytes"] == pytest.approx(sent, abs=1e-6)
    assert sent > 0


def test_rows_that_stay_are_exact() -> None:
    for rank in ranks("every expert everywhere"):
        logits, gradients, traffic = rank.bare
        assert traffic.copies == 0
        assert np.array_equal(rank.logits, logits)
        assert all(np.array_equal(rank.gradients[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize("name", CASES | COARSE)
def test_checkpointed_blocks_give_the_same_bits(name: str) -> None:
    assert all(rank.again for rank in ranks(name))


@pytest.mark.parametrize("name", CASES)
def test_mixed_precision_is_near(name: str) -> None:
    if CASES[name][1]:  # condensed by distances of other numbers
        return
    logits, _, _ = emulated(name)
    found = np.concatenate([rank.amp[0] for rank in ranks(name)])
    assert np.median(np.abs(found - logits)) < 0.05 * np.median(np.abs(logits))


@pytest.mark.parametrize("dispatch", ["coherent", "migrating"])
def test_other_dispatch_models_are_refused_by_name(dispatch: str) -> None:
    for answer in answers():
        assert f"fp8 rows beside {dispatch} dispatch, which carries the residual" in answer.refused[dispatch]
    with pytest.raises(InputError, match=f"fp8 rows beside {dispatch} dispatch; expected standard"):
        PLAIN.plan(wire="fp8", dispatch=dispatch)


def test_a_plan_without_fp8_rows_keeps_its_hash_and_one_with_them_its_form() -> None:
    plain, wired = PLAIN.plan(), PLAIN.plan(wire="fp8")
    assert "wire" not in plain.model_dump(mode="json")["decisions"]
    assert type(wired).model_validate_json(wired.model_dump_json()) == wired
    assert wired.decisions.wire == "fp8"
    assert wired.plan_sha256 != plain.plan_sha256
    with pytest.raises(ValueError, match="fp8"):
        PLAIN.plan(wire="int4")


class Rounding(nn.Module):
    """The experts of a block, each on a device of its own, and none on that of the tokens."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts, self.error = experts, 0.0

    def forward(self, x_TM: torch.Tensor, ids_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        columns, sent_TM = ids_TK.T[:, :, None], arrived(x_TM)
        parts = [self.experts(sent_TM, one, w[:, None]) for one, w in zip(columns, weight_TK.T, strict=True)]
        y_TM = torch.stack([arrived(part) for part in parts]).sum(0)
        exact_TM: torch.Tensor = self.experts(x_TM, ids_TK, weight_TK)
        self.error = ((y_TM - exact_TM).norm(dim=1) / exact_TM.norm(dim=1)).mean().item()
        return y_TM


def test_the_embedded_models_loss_on_unseen_text_hardly_rises_with_every_row_rounded() -> None:
    tokens = torch.from_numpy(samples(f"{record_text()}\n\n{other_text()}", 256))
    bits, model, rounding = list[float](), load_embedded(), list[Rounding]()
    blocks = [module for module in model.modules() if isinstance(module, MoEBlock)]
    for rounded in (False, True):
        if rounded:
            rounding = [Rounding(block.experts) for block in blocks]
            for block, experts in zip(blocks, rounding, strict=True):
                block.experts = experts  # type: ignore[assignment]
        with torch.no_grad():
            logits = torch.cat([model(some[:, :-1]) for some in torch.split(tokens, 16)])
        bits.append(functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item() / np.log(2))
    assert abs(bits[1] - bits[0]) < 0.001
    assert len(rounding) == 6
    assert all(0.01 < experts.error < 0.06 for experts in rounding)
