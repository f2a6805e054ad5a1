import hashlib
import itertools
import json
import math
from collections import Counter
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import train_demo as train_module
from benchmarks.train_demo import Recipe, expert_loads, held_out_loss, train
from moeplan.errors import UsageError
from moeplan.planner.demo.model import Layer, ModelConfig, MoELanguageModel, Router, load_embedded
from moeplan.planner.demo.text import other_text, record_embedded, record_text, samples, training_text
from moeplan.traces.reader import open_trace
from moeplan.traces.schema import PHASES

FOLDER = files("moeplan.planner.demo")
TINY = ModelConfig(
    vocab_size=11, num_layers=2, num_experts=4, hidden_size=16, ffn_size=6, num_heads=4, num_kv_heads=2, max_positions=8
)


@pytest.fixture(scope="module")
def tiny() -> MoELanguageModel:
    torch.manual_seed(1)
    return MoELanguageModel(TINY).eval()


@pytest.fixture(scope="module")
def embedded() -> MoELanguageModel:
    return load_embedded()


def tiny_tokens(samples: int, length: int) -> Tensor:
    return torch.randint(TINY.vocab_size, (samples, length), generator=torch.Generator().manual_seed(2))


@torch.inference_mode()
def test_forward_equals_a_twin_that_works_token_by_token_in_float64(tiny: MoELanguageModel) -> None:
    tokens = tiny_tokens(3, 7)
    expected = np.stack([naive_logits(tiny, sample.tolist()) for sample in tokens])
    np.testing.assert_allclose(tiny(tokens).numpy(), expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_rank_without_tokens_gets_empty_results(tiny: MoELanguageModel) -> None:
    layer, none = layers_of(tiny)[0], torch.zeros(0, TINY.hidden_size)
    q, k, v = layer.attention.project(none, torch.zeros(0, dtype=torch.int64))
    assert (q.shape, k.shape, v.shape) == ((0, 4, 4), (0, 2, 4), (0, 2, 4))
    assert layer.attention.attend(q, torch.zeros(3, 2, 4), torch.zeros(3, 2, 4), torch.ones(0, 3) > 0).shape == (0, 16)
    assert layer.moe(none).shape == (0, 16)
    assert layer.moe.experts(none, torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2)).shape == (0, 16)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_half_precision_and_near_the_whole_one(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model = MoELanguageModel(TINY).eval()
    tokens = tiny_tokens(2, 8)
    whole = model(tokens)
    attention, norm = layers_of(model)[0].attention, layers_of(model)[0].attention_norm
    model.to(dtype)
    queries, keys, values = attention.project(norm(model.embed(tokens)), torch.arange(8))
    assert {queries.dtype, keys.dtype, values.dtype, model(tokens).dtype} == {dtype}
    assert (model(tokens).float() - whole).abs().mean() < 0.05 * whole.abs().mean()


def test_positions_are_made_where_the_tokens_are() -> None:
    model = MoELanguageModel(TINY).to("meta")
    for layer in layers_of(model):
        layer.add_module("moe", torch.nn.Identity())  # it asks for numbers, which meta tensors lack
    assert model(tiny_tokens(2, 8).to("meta")).device.type == "meta"


def test_a_recording_that_breaks_off_leaves_no_trace_and_one_that_is_there_is_refused(tmp_path: Path) -> None:
    text, forward, passes = "abcdefgh" * 40, MoELanguageModel.forward, itertools.count()

    def breaks_off(model: MoELanguageModel, tokens: Tensor) -> Tensor:
        if next(passes):
            raise KeyboardInterrupt
        return forward(model, tokens)

    with patch.object(MoELanguageModel, "forward", breaks_off), pytest.raises(KeyboardInterrupt):
        record_embedded(text, tmp_path / "traces", sample_tokens=8)
    assert list(tmp_path.iterdir()) == []
    assert record_embedded(text, tmp_path / "traces", sample_tokens=8).num_tokens == 320
    with pytest.raises(UsageError, match="not empty"):
        record_embedded(text, tmp_path / "traces", sample_tokens=8)


def test_the_balance_loss_is_experts_times_share_times_probability_and_only_there_in_training() -> None:
    torch.manual_seed(6)
    router = Router(ModelConfig()).train()
    x = torch.randn(40, 128)
    _, ids = router(x)
    probability = (x @ router.gate.weight.T).softmax(-1).mean(0).tolist()
    count = Counter(ids.flatten().tolist())
    assert router.balance_loss is not None
    assert router.balance_loss.item() == pytest.approx(16 * sum(count[e] / 80 * p for e, p in enumerate(probability)))
    router.eval()(x)
    assert router.balance_loss is None


def test_the_spec_says_what_the_modules_are(embedded: MoELanguageModel) -> None:
    config, spec, first = embedded.config, embedded.config.spec(dtype_bytes=2), layers_of(embedded)[0]
    assert first.moe.experts.w_in.shape == (spec.num_experts, spec.ffn_size, spec.hidden_size)
    assert spec.layer_ids == tuple(range(len(embedded.layers)))
    assert spec.attention.kv_size == first.attention.key_value.weight.shape[0] == config.hidden_size // 4
    assert (spec.top_k, spec.dtype_bytes) == (config.top_k, 2)
    assert (spec.attention.num_heads, spec.attention.num_kv_heads) == (config.num_heads, config.num_kv_heads)
    assert len(embedded.routers) == spec.num_layers


def test_the_shipped_weights_reproduce_the_recorded_held_out_loss(embedded: MoELanguageModel) -> None:
    recorded = json.loads((FOLDER / "model.json").read_text())["held_out_loss"]
    assert held_out_loss(embedded) == pytest.approx(recorded, abs=1e-3)
    assert recorded / math.log(2) < 2.6  # bits a byte
    assert {tensor.dtype for tensor in embedded.state_dict().values()} == {torch.float32}
    assert not embedded.training
    for text in (record_text(), other_text()):  # every expert lives, and no layer is even or collapsed
        loads = expert_loads(embedded, samples(text, 128))
        assert (loads.min(1) / loads.sum(1)).min() >= 0.005
        skew = loads.max(1) / loads.mean(1)
        assert 1.3 < skew.min() <= skew.max() < 4


@torch.inference_mode()
def test_the_shipped_trace_is_what_the_shipped_model_routes_on_the_recording_half() -> None:
    tokens, embedded = samples(record_text(), 128), load_embedded()
    routed: list[Tensor] = []
    for router in embedded.routers:
        router.register_forward_hook(lambda _m, _i, output: routed.append(output[1]))
    embedded(torch.from_numpy(tokens))
    with as_file(FOLDER / "trace.parquet") as path:
        trace = open_trace(path)
        (batch,) = trace.batches()
    assert trace.model == embedded.config.spec()
    assert len(tokens) > 200
    assert batch.sample is not None
    assert (batch.sample == np.repeat(np.arange(len(tokens)), 128)).all()
    assert (batch.position == np.tile(np.arange(128), len(tokens))).all()
    assert (batch.phase == PHASES.index("prefill")).all()
    assert (batch.ids == torch.stack(routed, 1).numpy()).mean() > 0.999  # near ties fall as the machine rounds


def test_training_text_and_the_two_held_out_halves_share_no_paragraph() -> None:
    parts = [
        {" ".join(paragraph.split()) for paragraph in text.split("\n\n")}
        for text in (training_text(), record_text(), other_text())
    ]
    assert all(all(part) for part in parts)
    assert not any(one & other for one, other in itertools.combinations(parts, 2))
    assert f"{record_text()}\n\n{other_text()}" == (FOLDER / "heldout.txt").read_text(encoding="utf-8")
    sizes = [len(text) for text in (training_text(), record_text(), other_text())]
    assert sizes[1] == pytest.approx(sizes[2], rel=0.1)
    assert 0.1 < sum(sizes[1:]) / sum(sizes) < 0.2


def test_samples_are_the_bytes_in_order_and_a_text_that_fills_none_is_refused() -> None:
    assert samples("abcdé", 2).tolist() == [[97, 98], [99, 100], [0xC3, 0xA9]]
    assert samples("abcde", 2).tolist() == [[97, 98], [99, 100]]
    for text, length in (("", 1), ("abc", 4), ("abc", 0), ("abc", -1)):
        with pytest.raises(UsageError, match=f"a text of {len(text)} bytes does not fill a sample of {length} "):
            samples(text, length)


def test_training_learns_and_the_same_seed_gives_the_same_weights() -> None:
    config = ModelConfig(num_layers=1, num_experts=4, hidden_size=32, ffn_size=16, num_heads=4, max_positions=32)
    recipe = Recipe(steps=60, batch_size=4, peak_learning_rate=1e-2, warmup_steps=5)
    text = "the quick brown fox jumps over the lazy dog. " * 20
    one, two = train(config, text, recipe), train(config, text, recipe)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, two.state_dict()[name])
        assert torch.equal(tensor, tensor.half().float())
    assert train_module._loss(one, torch.from_numpy(samples(text, 32))).item() < 2.0  # 3.0 is order 0


def test_the_script_prints_the_hash_and_writes_weights_and_a_record_that_belong_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_module, "Recipe", lambda: Recipe(steps=1, batch_size=1, warmup_steps=2))
    for text in ("record_text", "other_text"):
        monkeypatch.setattr(train_module, text, lambda: record_text()[:4000])
    train_module.main(["-o", str(tmp_path)])
    monkeypatch.setattr("moeplan.planner.demo.model.files", lambda _: tmp_path)
    written = json.loads((tmp_path / "model.json").read_text())
    assert held_out_loss(load_embedded()) == pytest.approx(written["held_out_loss"], abs=1e-3)
    assert hashlib.sha256(training_text().encode()).hexdigest() == written["text_sha256"]
    assert written["text_sha256"] in capsys.readouterr().out
    assert written["recipe"]["steps"] == 1


def layers_of(model: MoELanguageModel) -> list[Layer]:
    return [module for module in model.layers if isinstance(module, Layer)]


def naive_logits(model: MoELanguageModel, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Logits `[S, V]` of one sample, one token after the other, from the weights alone."""
    config = model.config
    weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    group = config.num_heads // config.num_kv_heads
    xs = [weights["embed.weight"][token] for token in tokens]
    for layer in range(config.num_layers):
        w = {name.removeprefix(f"layers.{layer}."): value for name, value in weights.items()}
        normed = [norm(x) * w["attention_norm.weight"] for x in xs]
        keys_values = [(w["attention.key_value.weight"] @ x).reshape(2, config.num_kv_heads, -1) for x in normed]
        for t, x in enumerate(normed):
            queries = (w["attention.query.weight"] @ x).reshape(config.num_heads, -1)
            heads = []
            for head, query in enumerate(queries):
                seen = [(turn(kv[0][head // group], s), kv[1][head // group]) for s, kv in enumerate(keys_values)][
                    : t + 1
                ]
                scores = np.array([turn(query, t) @ key for key, _ in seen]) / math.sqrt(config.head_dim)
                shares = np.exp(scores) / np.exp(scores).sum()
                heads.append(sum(share * value for share, (_, value) in zip(shares, seen, strict=True)))
            xs[t] = xs[t] + w["attention.output.weight"] @ np.concatenate(heads)
        for t, x in enumerate(xs):
            normed_x = norm(x) * w["moe_norm.weight"]
            logits = w["moe.router.gate.weight"] @ normed_x
            chosen = sorted(range(config.num_experts), key=lambda expert: -logits[expert])[: config.top_k]
            total = sum(math.exp(logits[expert]) for expert in chosen)
            for expert in chosen:
                inner = w["moe.experts.w_in"][expert] @ normed_x
                inner = inner / (1 + np.exp(-inner))
                xs[t] = xs[t] + math.exp(logits[expert]) / total * (w["moe.experts.w_out"][expert] @ inner)
    return np.stack([weights["head.weight"] @ (norm(x) * weights["norm.weight"]) for x in xs])


def norm(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    normed: np.ndarray[Any, Any] = x / math.sqrt((x * x).mean() + 1e-6)
    return normed


def turn(x: np.ndarray[Any, Any], position: int) -> np.ndarray[Any, Any]:
    """Rotary positions as complex numbers: elements i and i + C/2 are one."""
    half = len(x) // 2
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * position * 10_000.0 ** (-np.arange(half) / half))
    return np.concatenate([turned.real, turned.imag])
