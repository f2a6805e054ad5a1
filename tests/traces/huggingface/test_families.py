"""What is recorded of each family is what its router chooses, recomputed with NumPy from hidden states and weights.

Legend: T tokens; L MoE layers; E experts; K experts a token; G groups of experts; M hidden size.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.traces.huggingface.checkpoint import load_model
from moeplan.traces.huggingface.record import record_model
from moeplan.traces.reader import open_trace
from tests.traces.huggingface.families import FAMILIES

Array = NDArray[Any]
MOE_LAYERS = {"qwen2_moe": (1, 3), "qwen3_moe": (0, 2, 3), "deepseek_v2": (1, 2, 3), "deepseek_v3": (2, 3)}
MOE_LAYERS |= {"glm4_moe": (1, 2, 3)}
SHARED = {"qwen2_moe": 1, "deepseek_v2": 2, "deepseek_v3": 1, "glm4_moe": 1}
GROUPED = ("deepseek_v2", "deepseek_v3", "glm4_moe")
ALL = (0, 1, 2, 3)


def softmax(logits_TE: Array) -> Array:
    shifted = np.exp(logits_TE - logits_TE.max(-1, keepdims=True))
    shares: Array = shifted / shifted.sum(-1, keepdims=True)
    return shares


def best(scores_TE: Array, count: int) -> Array:
    """The columns of the highest scores, highest first."""
    return np.argsort(-scores_TE, axis=-1, kind="stable")[:, :count]


def within_groups(scores_TE: Array, groups: int, chosen: int, largest: int) -> Array:
    """The scores, minus infinity outside the groups whose `largest` best scores have the highest sums."""
    by_group_TGE = scores_TE.reshape(len(scores_TE), groups, -1)
    rank_TG = np.sort(by_group_TGE, axis=-1)[..., -largest:].sum(-1)
    allowed_TG = np.zeros(rank_TG.shape, bool)
    np.put_along_axis(allowed_TG, best(rank_TG, chosen), True, axis=1)
    return np.where(allowed_TG[..., None], by_group_TGE, -np.inf).reshape(scores_TE.shape)


def sparse_mixer(logits_TE: Array, jitter: float) -> tuple[Array, Array]:
    """Phi-MoE's choice of two: each the best of what is left, its gate a softmax over scores close to it."""
    left_TE, ids, gates = logits_TE.copy(), [], []
    for _ in range(2):
        top_T1 = left_TE.max(-1, keepdims=True)
        far_TE = (top_T1 - logits_TE) / np.maximum(np.abs(logits_TE), top_T1) > 2 * jitter
        choice_T1 = left_TE.argmax(-1)[:, None]
        gates.append(np.take_along_axis(softmax(np.where(far_TE, -np.inf, left_TE)), choice_T1, 1))
        ids.append(choice_T1)
        np.put_along_axis(left_TE, choice_T1, -np.inf, axis=1)
    return np.concatenate(ids, 1), np.concatenate(gates, 1)


def chosen(family: str, router: Any, config: Any, x_TM: Array) -> tuple[Array, Array]:
    """Ids and gates `[T, K]` in no particular order."""
    top_k = config.num_experts_per_tok
    logits_TE = x_TM.astype(np.float64) @ router.weight.detach().double().numpy().T
    if family == "gpt_oss":
        logits_TE = logits_TE + router.bias.detach().double().numpy()
    if family == "phimoe":
        return sparse_mixer(logits_TE, config.router_jitter_noise)
    if family in ("deepseek_v3", "glm4_moe"):
        scores_TE = 1 / (1 + np.exp(-logits_TE))
        biased_TE = scores_TE + router.e_score_correction_bias.double().numpy()
        ids_TK = best(within_groups(biased_TE, config.n_group, config.topk_group, 2), top_k)
        gates_TK = np.take_along_axis(scores_TE, ids_TK, 1)
        return ids_TK, gates_TK / gates_TK.sum(-1, keepdims=True) * config.routed_scaling_factor
    scores_TE = softmax(logits_TE)
    if family == "deepseek_v2":
        ids_TK = best(within_groups(scores_TE, config.n_group, config.topk_group, 1), top_k)
        return ids_TK, np.take_along_axis(scores_TE, ids_TK, 1) * config.routed_scaling_factor
    ids_TK = best(scores_TE, top_k)
    gates_TK = np.take_along_axis(scores_TE, ids_TK, 1)
    renormalised = family in ("mixtral", "gpt_oss", "granitemoe") or getattr(config, "norm_topk_prob", False)
    return ids_TK, gates_TK / gates_TK.sum(-1, keepdims=True) if renormalised else gates_TK


def routers_of(model: Any) -> list[Any]:
    names = [n for n, _ in model.named_modules() if n.endswith((".gate", ".router"))]
    return [model.get_submodule(name) for name in names]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_go_where_the_routers_top_k_sends_and_the_trace_knows_the_model(
    checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    model = load_model(checkpoint(family))
    model.generation_config.eos_token_id = None
    routers, entered = routers_of(model), dict[int, list[Array]]()
    for index, router in enumerate(routers):
        router.register_forward_pre_hook(
            lambda _, args, index=index: entered.setdefault(index, []).append(
                args[0].detach().reshape(-1, args[0].shape[-1]).clone().numpy()
            )
        )
    prompts = np.random.default_rng(5).integers(4, 30, (3, 20)).tolist()
    done = record_model(
        model, prompts, tmp_path / "t", name=family, tokenizer="x", generate=4, weights=True, batch_samples=2
    )
    batch: Any
    (batch,) = open_trace(tmp_path / "t").batches(weights=True)
    assert done.num_tokens == len(batch) == sum(len(x) for x in entered[0])
    for layer, router in enumerate(routers):
        ids_TK, gates_TK = chosen(family, router, model.config, np.concatenate(entered[layer]))
        order = np.argsort(-gates_TK, axis=1, kind="stable")
        np.testing.assert_array_equal(batch.ids[:, layer], np.take_along_axis(ids_TK, order, 1))
        np.testing.assert_allclose(
            batch.weights[:, layer], np.take_along_axis(gates_TK, order, 1), rtol=2e-3, atol=1e-6
        )
    assert (batch.phase == 1).any()
    spec, grouped = open_trace(tmp_path / "t").meta.model, family in GROUPED
    assert (spec.layer_ids, spec.num_hidden_layers) == (MOE_LAYERS.get(family, ALL), 4)
    assert (spec.num_experts, spec.top_k) == (8 if grouped else 6, 3 if grouped else model.config.num_experts_per_tok)
    assert (spec.num_shared_experts, spec.hidden_size, spec.dtype_bytes) == (SHARED.get(family, 0), 32, 4)
    assert (spec.num_expert_groups, spec.top_k_groups) == ((4, 2) if grouped else (None, None))
    assert spec.ffn_size == (16 if family in (*GROUPED, "qwen2_moe", "qwen3_moe") else 24)
    assert spec.attention.kv_size == (12 + 4 if family.startswith("deepseek") else 2 * 2 * 8)
    assert spec.attention.num_heads == 4


def test_the_choice_of_groups_and_biases_differs_from_the_plain_top_k(checkpoint: Callable[..., Path]) -> None:
    """Else the tests above would pass for a recorder that takes the top-k of a softmax."""
    x_TM = np.random.default_rng(0).normal(size=(64, 32))
    for family in GROUPED:
        model = load_model(checkpoint(family))
        router = routers_of(model)[0]
        ids_TK, _ = chosen(family, router, model.config, x_TM)
        plain_TK = best(x_TM @ router.weight.detach().double().numpy().T, 3)
        assert (np.sort(ids_TK) != np.sort(plain_TK)).any()
