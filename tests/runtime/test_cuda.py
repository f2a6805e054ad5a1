"""Plans carried out on a GPU, held against the same ones on CPUs in float64: one rank over NCCL, four over gloo."""

import functools
from dataclasses import replace

import pytest
import torch

from moeplan.profilers.routed import weighted_experts
from moeplan.profilers.world import run_world
from tests.builders import known
from tests.runtime.cuda_cases import ALONE, SETTINGS, Carried, Work, carried

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

WAYS = {
    "float64": Work((), torch.float64),
    "bfloat16": Work((), torch.bfloat16),
    "autocast": Work((), torch.float32, autocast=True),
}
EXACT, COARSE, FLIPPED = 1e-6, 0.03, 0.3  # most of the norm of errors over the exact norm; rotary angles are float32
WORLDS = [*((1, name) for name in ALONE), *((4, name) for name in SETTINGS)]
every_setting = pytest.mark.parametrize(("num_ranks", "name"), WORLDS)


@functools.cache
def exact(num_ranks: int) -> list[dict[str, Carried]]:
    """On CPUs, by rank."""
    return known(run_world(num_ranks, carried, Work(_names(num_ranks)), timeout_s=300))


@functools.cache
def found(num_ranks: int, way: str) -> list[dict[str, Carried]]:
    """On the GPU, by rank: NCCL takes one rank a GPU, gloo any number."""
    work = replace(WAYS[way], names=_names(num_ranks), device="cuda:0")
    return known(run_world(num_ranks, carried, work, device="cuda" if num_ranks == 1 else "cpu", timeout_s=300))


def _names(num_ranks: int) -> list[str]:
    return [name for size, name in WORLDS if size == num_ranks]


@pytest.mark.parametrize("way", WAYS)
@every_setting
def test_logits_gradients_and_losses_are_those_of_cpus(num_ranks: int, name: str, way: str) -> None:
    rounds = SETTINGS[name].rounds and way != "float64"
    most = EXACT if way == "float64" else FLIPPED if rounds else COARSE
    for here, there in zip(found(num_ranks, way), exact(num_ranks), strict=True):
        one, expected = here[name], there[name]
        assert off(one.logits, expected.logits) < most
        assert one.gradients.keys() == expected.gradients.keys()
        for parameter, gradient in () if rounds else expected.gradients.items():
            assert off(one.gradients[parameter], gradient) < most, parameter
        assert one.norm == pytest.approx(expected.norm, rel=most)
        assert one.losses == pytest.approx(expected.losses, rel=most)


@every_setting
def test_what_travels_and_moves_is_what_does_on_cpus(num_ranks: int, name: str) -> None:
    for here, there in zip(found(num_ranks, "float64"), exact(num_ranks), strict=True):
        one, expected = here[name], there[name]
        assert one.traffic == expected.traffic
        assert (one.operations, one.moved) == (expected.operations, expected.moved)
        assert one.generated == expected.generated


def test_settings_of_four_ranks_move_experts_and_condense_rows() -> None:
    everything = found(4, "float64")[0]
    assert all(everything[name].moved for name in SETTINGS if SETTINGS[name].rebalancing)
    assert all(everything[name].traffic.condensed for name in SETTINGS if SETTINGS[name].condensation)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 9, 300])
def test_grouped_experts_give_the_outputs_and_gradients_of_exact_ones(num_tokens: int, gated: bool) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    sizes = (num_tokens, 64), (num_tokens, 2), (8, 96 if gated else 48, 64), (8, 64, 48), (num_tokens, 64)
    x, weight, w_in, w_out, upstream = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
    ids = 1 + torch.rand(num_tokens, 6, generator=generator).argsort(1)[:, :2]  # nobody asks the first and the last

    def run(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        given = [one.to(device, dtype).requires_grad_() for one in (x, weight, w_in / 8, w_out / 8)]
        y = weighted_experts(given[0], ids.to(device), *given[1:])
        return [y.detach(), *torch.autograd.grad(y, given, upstream.to(device, dtype), materialize_grads=True)]

    torch.full((2**24,), torch.nan, device="cuda:0")  # freed, for rows that nobody writes
    for one, expected in zip(run("cuda:0", torch.bfloat16), run("cpu", torch.float64), strict=True):
        assert off(one.double().cpu(), expected) < COARSE or not expected.any()
        assert not one[expected.cpu() == 0].any()


def off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the error as a share of the exact one's; not a number passes nothing."""
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-300))
