"""Experts behind condensed rows in training: counts recounted token by token, and what each method leaves exact."""

import pytest
import torch
from torch import Tensor, nn

from benchmarks.cases.condensed_training import CONFIG, COPIES, DROPPED, FP8, ROWS, Rows, Sent
from moeplan.planner.demo.model import Experts
from moeplan.planner.strategies.luffy.folding import Gate, Way
from moeplan.profilers.encoded import decoded, encoded

NEAR, FAR = Way("none is so near", Gate(1e-9)), Way("all are", Gate(1e9))
TOKENS = 16 * CONFIG.max_positions


@pytest.fixture
def experts() -> nn.Module:
    torch.manual_seed(0)
    return Experts(CONFIG.num_experts, CONFIG.hidden_size, CONFIG.ffn_size)


@pytest.fixture
def routed() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, two experts of each token and their gate weights."""
    torch.manual_seed(1)
    top_TK, ids_TK = torch.randn(TOKENS, CONFIG.num_experts).topk(2)
    return torch.randn(TOKENS, CONFIG.hidden_size), ids_TK, top_TK.softmax(1)


def remote(devices: str, token: int, ids: list[int]) -> int:
    """The rows of a token to other devices."""
    if devices == COPIES:
        return len(ids)
    return len({expert // 2 for expert in ids} - {token // (4 * CONFIG.max_positions)})


@pytest.mark.parametrize("devices", [ROWS, COPIES])
def test_where_no_row_is_near_nothing_changes_and_rows_are_those_of_a_recount(
    devices: str, experts: nn.Module, routed: tuple[Tensor, Tensor, Tensor]
) -> None:
    rows = Rows(devices, NEAR)
    torch.testing.assert_close(Sent(0, experts, rows)(*routed), experts(*routed))
    counted = rows.counted.all
    assert counted["rows"] == counted["sent"] == sum(remote(devices, *of) for of in enumerate(routed[1].tolist()))


def test_tokens_whose_experts_are_on_their_own_device_stay_exact(
    experts: nn.Module, routed: tuple[Tensor, Tensor, Tensor]
) -> None:
    rows = Rows(ROWS, FAR)
    y_TM, exact_TM = Sent(0, experts, rows)(*routed), experts(*routed)
    home_T = torch.tensor([remote(ROWS, *of) == 0 for of in enumerate(routed[1].tolist())])
    assert 0 < home_T.sum() < TOKENS / 4
    torch.testing.assert_close(y_TM[home_T], exact_TM[home_T])
    assert rows.counted.saved() > 0.9
    assert not torch.isclose(y_TM[~home_T], exact_TM[~home_T]).all(1).any()


def test_a_dropped_second_expert_leaves_its_weight_to_the_first(
    experts: nn.Module, routed: tuple[Tensor, Tensor, Tensor]
) -> None:
    x_TM, ids_TK, weight_TK = routed
    rows = Rows(COPIES, DROPPED.way)
    alone_TK = torch.where(weight_TK[:, 1:] < 0.4, torch.tensor([1.0, 0.0]), weight_TK)
    torch.testing.assert_close(Sent(0, experts, rows)(*routed), experts(x_TM, ids_TK, alone_TK))
    assert rows.counted.saved() == pytest.approx(float((weight_TK[:, 1] < 0.4).float().mean()) / 2)


def test_gradients_of_fp8_rows_travel_as_fp8_rows_too(routed: tuple[Tensor, Tensor, Tensor]) -> None:
    x_TM, ids_TK, weight_TK = routed
    x_TM.requires_grad_()
    weight_TK = torch.tensor([1.0, 0.0]).expand_as(weight_TK)

    class Same(nn.Module):
        def forward(self, x_mM: Tensor, _ids_mK: Tensor, weight_mK: Tensor) -> Tensor:
            return x_mM * weight_mK.sum(1, keepdim=True)

    y_TM = Sent(0, Same(), Rows(COPIES, FP8.way))(x_TM, ids_TK, weight_TK)
    grad_TM = torch.randn_like(y_TM)
    y_TM.backward(grad_TM)
    once_TM, back_TM = (decoded(encoded(of_TM.detach()), torch.float32) for of_TM in (x_TM, grad_TM))
    torch.testing.assert_close(y_TM, decoded(encoded(once_TM), torch.float32), rtol=0, atol=0)
    torch.testing.assert_close(x_TM.grad, decoded(encoded(back_TM), torch.float32), rtol=0, atol=0)
