"""What is recorded of a model: its router's choices as NumPy finds them, and what batches, padding and ends leave.

Legend: T tokens; L MoE layers; E experts; K experts per token; G groups of experts; M hidden size.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import moeplan.traces
from moeplan.errors import UsageError
from moeplan.traces.huggingface.checkpoint import load_model
from moeplan.traces.huggingface.record import _Progress, record_model
from moeplan.traces.model import Latent
from moeplan.traces.reader import open_trace
from moeplan.traces.recording.kept import sampled
from tests.traces.huggingface.families import FAMILIES

PROMPTS = [np.random.default_rng(seed).integers(4, 30, length).tolist() for seed, length in enumerate((9, 3, 14, 1, 6))]


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "gpt_oss"])
def model(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Any:
    loaded = load_model(checkpoint(request.param))
    loaded.generation_config.eos_token_id = None
    return loaded


def recorded(model: Any, folder: Path, prompts: list[list[int]], **options: Any) -> Any:
    record_model(model, prompts, folder, name="tiny", tokenizer="x", **options)
    return read(folder)


def read(folder: Path) -> Any:
    (batch,) = open_trace(folder).batches()
    return batch


def by_token(batch: Any) -> dict[tuple[int, int], list[list[int]]]:
    keys = zip(batch.sample.tolist(), batch.position.tolist(), strict=True)
    return dict(zip(keys, batch.ids.tolist(), strict=True))


def test_padded_batches_record_what_single_prompts_do(model: Any, tmp_path: Path) -> None:
    together = recorded(model, tmp_path / "a", PROMPTS, generate=3, batch_samples=4)
    alone = recorded(model, tmp_path / "b", PROMPTS, generate=3, batch_samples=1)
    expected = {(sample, at) for sample, prompt in enumerate(PROMPTS) for at in range(len(prompt) + 3)}
    assert by_token(together) == by_token(alone)
    assert by_token(together).keys() == expected
    assert together.step is None
    assert together.source_rank is None


def test_decoded_tokens_are_those_that_greedy_generation_gives(model: Any, tmp_path: Path) -> None:
    prompt = PROMPTS[0]
    batch = recorded(model, tmp_path / "a", [prompt], generate=4)
    whole = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0].tolist()
    again = recorded(model, tmp_path / "b", [whole], router=r".*\.(gate|router)")  # what a pattern finds is the same
    assert by_token(batch) == by_token(again)
    assert batch.phase.tolist() == [0] * len(prompt) + [1] * 4
    assert not again.phase.any()


def test_a_sample_ends_before_its_end_of_text_and_the_others_go_on(model: Any, tmp_path: Path) -> None:
    free = recorded(model, tmp_path / "free", PROMPTS[:2], generate=5)
    follow = [
        model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in PROMPTS[:2]
    ]
    end = follow[0][2]
    model.generation_config.eos_token_id = [end, 47]
    ended = recorded(model, tmp_path / "ended", PROMPTS[:2], generate=5)
    model.generation_config.eos_token_id = None
    left = [[*tokens, end].index(end) for tokens in follow]
    last = [len(prompt) + count for prompt, count in zip(PROMPTS, left, strict=False)]
    assert by_token(ended) == {key: ids for key, ids in by_token(free).items() if key[1] < last[key[0]]}


def test_a_share_of_the_samples_keeps_their_numbers_and_the_bound_is_met_exactly(model: Any, tmp_path: Path) -> None:
    prompts = PROMPTS * 8
    part = recorded(model, tmp_path / "part", prompts, sample_rate=0.4)
    bounded = recorded(model, tmp_path / "bounded", prompts, sample_rate=0.4, max_tokens=17, batch_samples=2)
    np.testing.assert_array_equal(bounded.ids, part.ids[:17])
    chosen = np.flatnonzero(sampled(np.arange(len(prompts)), 0.4))
    assert 0 < len(chosen) < len(prompts)
    assert np.unique(part.sample).tolist() == chosen.tolist()
    whole = by_token(recorded(model, tmp_path / "whole", prompts))
    assert by_token(part) == {key: ids for key, ids in whole.items() if key[0] in chosen}


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[5] * 127], {"generate": 2}, "sample 0 has 127 tokens and 2 to generate; the model takes 128"),
        ([[5], [48]], {}, "sample 1 has token 48; the model knows 48"),
        ([[5]], {"sample_rate": 1e-9}, "keeps none of 1 samples"),
        ([[5]], {"sample_rate": 0.0}, "sample rate 0.0"),
        ([[5]], {"max_tokens": 0}, "at most 0 tokens"),
        ([[5]], {"embeddings": "9"}, "embeddings of layers 9"),
        ([[5]], {"router": "nothing"}, "matches no module"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    model: Any, tmp_path: Path, prompts: list[list[int]], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        recorded(model, tmp_path / "t", prompts, **options)
    assert not list(tmp_path.iterdir())


def test_ctrl_c_leaves_what_was_recorded(model: Any, tmp_path: Path) -> None:
    def interrupts(text: str) -> None:
        if "recorded 2 of" in text:
            raise KeyboardInterrupt

    done = record_model(
        model, PROMPTS, tmp_path / "t", name="tiny", tokenizer="x", batch_samples=1, on_progress=interrupts
    )
    assert done.interrupted
    assert done.num_tokens == open_trace(tmp_path / "t").num_tokens == len(PROMPTS[0]) + len(PROMPTS[1])


def test_the_time_left_is_that_of_the_nearer_end_at_the_rate_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    said: list[str] = []
    by_samples, by_tokens = _Progress(said.append, 40, None), _Progress(said.append, 40, 100)
    by_samples(0, 0)
    now_s[0] = 130.0
    by_samples(10, 50)
    by_tokens(10, 50)
    assert said == [
        "recorded 0 of 40 samples, 0 tokens",
        "recorded 10 of 40 samples, 50 tokens, 1:30 left",
        "recorded 10 of 40 samples, 50 tokens, 0:30 left",
    ]


TOKENS = np.random.default_rng(2).integers(4, 30, (3, 12))


@pytest.fixture(params=["olmoe", "glm4_moe", "granitemoe"])
def tuned(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Any:
    loaded = load_model(checkpoint(request.param))
    loaded.generation_config.eos_token_id = None
    return loaded


@pytest.mark.parametrize("reentrant", [False, True])
def test_fine_tuning_with_gradient_checkpointing_is_recorded_once(tuned: Any, tmp_path: Path, reentrant: bool) -> None:
    record_model(tuned, TOKENS.tolist(), tmp_path / "plain", name="x", tokenizer="x")
    tuned.train()
    tuned.activation_checkpointing_enable({"use_reentrant": reentrant})
    tuned.enable_input_require_grads()
    tokens_BS = torch.from_numpy(TOKENS)
    mask_BS = torch.ones_like(tokens_BS)
    mask_BS[1, 7:] = 0
    with moeplan.traces.record(tuned, tmp_path / "t"):
        tuned(input_ids=tokens_BS, attention_mask=mask_BS, labels=tokens_BS).loss.backward()
    batch, plain = read(tmp_path / "t"), read(tmp_path / "plain")
    np.testing.assert_array_equal(batch.ids, plain.ids[mask_BS.flatten().bool().numpy()])
    assert set(batch.phase.tolist()) == {2}


def test_generation_continues_its_samples_and_is_told_from_prefill(tuned: Any, tmp_path: Path) -> None:
    tokens_BS = torch.from_numpy(TOKENS)
    mask_BS = torch.ones_like(tokens_BS)
    mask_BS[0, :4] = 0
    with moeplan.traces.record(tuned, tmp_path / "t"):
        whole = tuned.generate(tokens_BS, attention_mask=mask_BS, max_new_tokens=4, do_sample=False)
        tuned(tokens_BS)
    batch = read(tmp_path / "t")
    lengths = [8, 12, 12]
    for sample, (length, row) in enumerate(zip(lengths, whole.tolist(), strict=True)):
        rows = batch.sample == sample
        assert batch.position[rows].tolist() == [*range(length + 3)]
        assert batch.phase[rows].tolist() == [0] * length + [1] * 3
        record_model(tuned, [row[12 - length : -1]], tmp_path / str(sample), name="x", tokenizer="x")
        np.testing.assert_array_equal(batch.ids[rows], read(tmp_path / str(sample)).ids)
    assert set(batch.sample.tolist()) == {*range(6)}


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
    latent = Latent(kv_rank=12, q_rank=10, head_size=8, rope_size=4, value_size=8)
    assert spec.attention.latent == (latent if family.startswith("deepseek") else None)


def test_the_choice_of_groups_and_biases_differs_from_the_plain_top_k(checkpoint: Callable[..., Path]) -> None:
    """Else the tests above would pass for a recorder that takes the top-k of a softmax."""
    x_TM = np.random.default_rng(0).normal(size=(64, 32))
    for family in GROUPED:
        model = load_model(checkpoint(family))
        router = routers_of(model)[0]
        ids_TK, _ = chosen(family, router, model.config, x_TM)
        plain_TK = best(x_TM @ router.weight.detach().double().numpy().T, 3)
        assert (np.sort(ids_TK) != np.sort(plain_TK)).any()
