"""The view of a transformers model, against the model's own forward.

Equality is of float64 at 1e-12, though transformers norms and routes in float32: sums in another order differ by 1e-16,
which a rounding to float32 hides but about once in 1e8 numbers. Its eager softmax sums in float32: there at 1e-5.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moeplan.errors import UsageError
from moeplan.planner.demo.model import ModelConfig, MoELanguageModel
from moeplan.runtime.models.huggingface import view
from moeplan.runtime.models.protocols import LanguageModel
from tests.runtime.models.huggingface_models import FAMILIES, WINDOW, make_model

pytest.importorskip("transformers")

EAGER = "mixtral, eager"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral without window": ("mixtral", {"sliding_window": None}),
    EAGER: ("mixtral", {"attn_implementation": "eager"}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, sparse every other layer": ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}),
    "qwen3_moe, gates as they are": ("qwen3_moe", {"norm_topk_prob": False, "use_sliding_window": False}),
    "olmoe": ("olmoe", {}),
    "olmoe, one key head": ("olmoe", {"num_key_value_heads": 1, "clip_qkv": None}),
    "olmoe with a window in its configuration that it ignores": ("olmoe", {"sliding_window": WINDOW}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, top-4": ("gpt_oss", {"num_experts_per_tok": 4}),
}
LENGTHS = [9, 1, 14]


@pytest.mark.parametrize("name", VARIANTS)
def test_flat_tokens_through_the_view_have_the_logits_of_the_models_own_forward(name: str) -> None:
    family, changes = VARIANTS[name]
    model = make_model(family, **changes)
    seen, samples = view(model), _samples()
    position_T = torch.cat([torch.arange(len(sample)) for sample in samples])
    context_T = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(LENGTHS))
    got = _run(seen, torch.cat(samples), position_T, context_T)
    for sample, logits in zip(samples, torch.split(got, LENGTHS), strict=True):
        _assert_close(logits, model(sample[None]).logits[0], name)
        assert torch.equal(seen(sample[None]), model(sample[None]).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_through_the_view_are_those_of_the_models_own_forward(family: str) -> None:
    model = make_model(family).train()
    sample = _samples()[0]
    parameters = list(model.parameters())
    weight = torch.randn(len(sample), 64, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    position = torch.arange(len(sample))
    got = _run(view(model), sample, position, torch.zeros_like(position))
    expected = model(sample[None]).logits[0]
    pairs = zip(*(torch.autograd.grad((y * weight).sum(), parameters) for y in (got, expected)), strict=True)
    assert max(float((mine - own).norm() / own.norm()) for mine, own in pairs) <= 1e-12


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_contexts_that_attend_at_once_do_what_each_does_alone_under_any_mask(family: str, queries: int) -> None:
    attention = view(make_model(family)).layers[0].attention
    generator = torch.Generator().manual_seed(2)
    x_bSM = torch.randn(3, 9, 32, dtype=torch.float64, generator=generator)
    alone = [attention.project(x_SM, torch.arange(9)) for x_SM in x_bSM]
    q, k, v = (torch.stack(part) for part in zip(*alone, strict=True))
    mask = torch.rand(3, queries, 9, generator=generator) < 0.5
    mask[..., 0] = True
    for masks in (mask, mask[0].expand_as(mask)):
        together = attention.attend(q[:, :queries], k, v, masks if masks is mask else mask[0])
        for row, (q_S, k_S, v_S) in enumerate(alone):
            _assert_close(together[row], attention.attend(q_S[:queries], k_S, v_S, masks[row]), family)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_takes_no_tokens(family: str) -> None:
    seen, nothing = view(make_model(family)), torch.empty(0, dtype=torch.int64)
    assert _run(seen, nothing, nothing, nothing).shape == (0, 64)
    q, k, v = seen.layers[0].attention.project(torch.empty(0, 32, dtype=torch.float64), nothing)
    assert seen.layers[0].attention.attend(q, k, v, torch.empty(0, 0, dtype=torch.bool)).shape == (0, 32)


def test_the_windows_are_those_of_each_layer() -> None:
    windows = {family: [layer.attention.window for layer in view(make_model(family)).layers] for family in FAMILIES}
    assert windows == {
        "mixtral": [WINDOW] * 3,
        "qwen3_moe": [WINDOW] * 3,
        "olmoe": [None] * 3,
        "gpt_oss": [WINDOW, None, WINDOW],
    }


def test_a_dense_layer_has_no_experts_and_a_routed_one_those_that_its_block_calls_now() -> None:
    model: Any = make_model("qwen3_moe")
    layers = view(model).layers
    assert [hasattr(layer.moe, "experts") for layer in layers] == [True, False, True]
    model.model.layers[2].mlp.experts = replaced = nn.Identity()
    assert layers[2].moe.experts is replaced


def test_another_family_is_refused_by_its_class_a_subclass_is_seen_as_its_family_and_ours_as_it_is() -> None:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_experts": 2, "num_attention_heads": 2}
    with torch.device("meta"):
        other = Qwen2MoeForCausalLM(Qwen2MoeConfig(vocab_size=8, **sizes))
    for model in (other, nn.Linear(2, 2)):
        with pytest.raises(UsageError, match=f"class {type(model).__name__}; .*MixtralForCausalLM"):
            view(model)
    ours: Any = MoELanguageModel(ModelConfig(num_layers=1))
    assert view(ours) is ours
    subclass = make_model("mixtral")
    subclass.__class__ = type("FSDPMixtralForCausalLM", (type(subclass),), {"__module__": "elsewhere"})
    assert view(subclass).layers[0].attention.window == WINDOW


def test_rotary_positions_that_depend_on_the_batch_are_refused() -> None:
    rotary = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    with pytest.raises(UsageError, match="'dynamic' depend on the longest sample"):
        view(make_model("mixtral", rope_parameters=rotary))


def test_jitter_of_the_router_is_refused_by_its_name_in_training() -> None:
    model = make_model("mixtral", router_jitter_noise=0.1)
    attention = view(model).layers[0].attention
    x_TM, position_T = torch.ones(2, 32, dtype=torch.float64), torch.arange(2)
    attention.project(x_TM, position_T)
    model.train()
    with pytest.raises(UsageError, match=r"router_jitter_noise 0\.1 in training"):
        attention.project(x_TM, position_T)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_dropout_is_drawn_in_training_only_and_from_the_generator(family: str) -> None:
    model = make_model(family, attention_dropout=0.5)
    attention = view(model).layers[0].attention
    q, k, v = attention.project(torch.randn(6, 32, dtype=torch.float64), torch.arange(6))
    mask, drawn = torch.ones(6, 6, dtype=torch.bool).tril(), []
    for training, seed in ((False, 0), (False, 1), (True, 0), (True, 0), (True, 1)):
        model.train(training)
        assert attention.dropout == 0.5 * training
        torch.manual_seed(seed)
        drawn.append(attention.attend(q, k, v, mask))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    assert torch.equal(drawn[2], drawn[3])
    assert not torch.equal(drawn[3], drawn[4])


def _run(seen: LanguageModel, tokens_T: Tensor, position_T: Tensor, context_T: Tensor) -> Tensor:
    """Logits of flat tokens, each seeing those of its context."""
    x_TM, distance = seen.embed(tokens_T), position_T[:, None] - position_T
    for layer in seen.layers:
        q, k, v = layer.attention.project(layer.attention_norm(x_TM), position_T)
        mask = (context_T[:, None] == context_T) & (distance >= 0)
        if layer.attention.window is not None:
            mask &= distance < layer.attention.window
        x_TM = x_TM + layer.attention.attend(q, k, v, mask)
        x_TM = x_TM + _moe(layer.moe, layer.moe_norm(x_TM))
    return seen.head(seen.norm(x_TM))


def _moe(moe: Any, x_TM: Tensor) -> Tensor:
    """The block in one call, once its two halves were seen to do the same."""
    y_TM: Tensor = moe(x_TM)
    if hasattr(moe, "experts"):
        weights_TK, ids_TK = moe.router(x_TM)
        assert torch.equal(moe.experts(x_TM, ids_TK, weights_TK), y_TM)
    return y_TM


def _samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 64, (length,), generator=generator) for length in LENGTHS]


def _assert_close(got: Tensor, expected: Tensor, name: str) -> None:
    tolerance = 1e-5 if name == EAGER else 1e-12
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
