"""The recorder on small torch modules whose routing is known."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from torch import Tensor, nn

from moeplan.errors import InputError, StorageError, UsageError
from moeplan.traces.model import ModelSpec
from moeplan.traces.reader import open_trace
from moeplan.traces.recording.embeddings import EmbeddingWriter, embedded_layers
from moeplan.traces.recording.kept import Kept, sampled
from moeplan.traces.recording.layers import MoELayer, hidden_layers, moe_layers
from moeplan.traces.recording.recorder import Recorder
from moeplan.traces.schema import TokenBatch, TraceMeta
from moeplan.traces.split import fitted, mixed
from moeplan.traces.writer import TraceWriter

L, E, K, M = 3, 8, 2, 4
PATTERN = r"layers\.\d+\.moe\.router"


class Router(nn.Linear):
    """Gives logits `[..., E]`; weights and ids `[T, K]`, smallest first; or ids in a tuple with something else."""

    def __init__(self, gives: str) -> None:
        super().__init__(M, E, bias=False)
        self.gives = gives

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        weights, ids = logits.flatten(0, -2).softmax(-1).topk(K)
        either = {"weights": (weights.flip(-1), ids.flip(-1)), "ids": ({"loss": 0.0}, ids.int())}
        return either.get(self.gives, logits)


class Canned(nn.Module):
    """Gives the same whatever it gets."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, _: Tensor) -> Any:
        return self.output


class Model(nn.Module):
    def __init__(self, router: Callable[[], nn.Module] = lambda: Router("logits")) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.ModuleDict({"moe": nn.ModuleDict({"router": router()})}) for _ in range(L))
        self.skip: int | None = None

    def forward(self, x: Tensor) -> None:
        for index, layer in enumerate(self.layers):
            if index != self.skip:
                layer["moe"]["router"](x)  # type: ignore[index]


@pytest.fixture
def writer(tmp_path: Path) -> TraceWriter:
    model = ModelSpec(name="modules", layer_ids=tuple(range(L)), num_experts=E, top_k=K)
    return TraceWriter(tmp_path, TraceMeta(form="tokens", model=model, recorder="test"), weights=True)


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, M, generator=torch.Generator().manual_seed(1))


def expected_routing(model: Model, x: Tensor) -> tuple[Any, Any]:
    flat = x.flatten(0, -2)
    gates = [(flat @ layer["moe"]["router"].weight.T).softmax(-1).detach().topk(K) for layer in model.layers]  # type: ignore[index]
    return np.stack([g.indices.numpy() for g in gates], 1), np.stack([g.values.numpy() for g in gates], 1)


def read(path: Path, **options: Any) -> Any:
    (batch,) = open_trace(path).batches(**options)
    return batch


def record(recorder: Recorder, model: Model, tokens: int, *, positions: int | None = None, passes: int = 1) -> None:
    with recorder.tokens(position=range(positions or tokens)):
        for _ in range(passes):
            model(inputs(tokens))


@pytest.mark.parametrize("gives", ["logits", "weights"])
def test_what_routers_chose_is_recorded(tmp_path: Path, writer: TraceWriter, gives: str) -> None:
    model, x = Model(lambda: Router(gives)), inputs(2, 5)
    with writer, Recorder(model, PATTERN, writer) as recorder:
        with recorder.tokens(sample=[0] * 5 + [1] * 5, position=torch.arange(5).repeat(2), step=7, phase="decode"):
            model(x)
        with recorder.tokens(sample=2, position=[5], step=8, phase="decode"):
            model(x[:1, :1])
    batch = read(tmp_path, weights=True)
    ids, gates = expected_routing(model, x)
    np.testing.assert_array_equal(batch.ids[:10], ids)
    np.testing.assert_array_equal(batch.ids[10], ids[0])
    np.testing.assert_allclose(batch.weights[:10], gates, rtol=1e-3)
    assert batch.sample.tolist() == [0] * 5 + [1] * 5 + [2]
    assert batch.step.tolist() == [7] * 10 + [8]
    assert batch.position.tolist() == [*range(5), *range(5), 5]
    assert batch.source_rank is None
    assert set(batch.phase.tolist()) == {1}


def test_ids_without_weights_keep_their_order(tmp_path: Path, writer: TraceWriter) -> None:
    model = Model(lambda: Router("ids"))
    with TraceWriter(tmp_path / "ids", writer.meta) as plain, Recorder(model, PATTERN, plain) as recorder:
        record(recorder, model, 6)
    batch = read(tmp_path / "ids")
    np.testing.assert_array_equal(batch.ids, expected_routing(model, inputs(6))[0])
    with Recorder(model, PATTERN, writer) as recorder, pytest.raises(InputError, match="no gate weights"):
        record(recorder, model, 6)


def test_nothing_is_recorded_outside_the_block_or_after_the_end(writer: TraceWriter) -> None:
    model = Model()
    with Recorder(model, PATTERN, writer) as recorder:
        model(inputs(4))
        record(recorder, model, 4)
    model(inputs(4))
    assert writer.num_tokens == 4
    assert not any(module._forward_hooks for module in model.modules())


def test_a_router_that_did_not_run_or_ran_twice_or_on_other_tokens_is_named(writer: TraceWriter) -> None:
    model = Model()
    with Recorder(model, PATTERN, writer) as recorder:
        model.skip = 1
        with pytest.raises(InputError, match=re.escape("layers.1.moe.router did not run")):
            record(recorder, model, 4)
        model.skip = None
        with pytest.raises(InputError, match=re.escape("layers.0.moe.router ran twice")):
            record(recorder, model, 4, passes=2)
        with pytest.raises(InputError, match=re.escape("moe.router gave 4 tokens; positions were given for 5")):
            record(recorder, model, 4, positions=5)
    assert writer.num_tokens == 0


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (torch.zeros(4, E + 1), "expected integer ids"),
        (None, "expected integer ids"),
        (torch.full((4, E), torch.nan), "not finite"),
        (torch.full((4, K), E), "expert ids 8 to 8"),
        (torch.full((4, K), -2), "expert ids -2 to -2"),
        ((torch.tensor([[0.5, 0.2]] * 4), torch.tensor([[3, -1]] * 4)), None),
    ],
)
def test_what_is_no_routing_is_refused_by_name_and_a_dropped_choice_taken(
    tmp_path: Path, writer: TraceWriter, output: Any, expected: str | None
) -> None:
    model = Model(lambda: Canned(output))
    refusal = pytest.raises(InputError, match=f"layers.0.moe.router.*{expected}") if expected else nullcontext()
    with writer, Recorder(model, PATTERN, writer) as recorder, refusal:
        record(recorder, model, 4)
    assert expected or read(tmp_path).ids[0, 0].tolist() == [3, 65_535]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.router", "no regular expression"),
        ("gate", r"matches no module.*layers\.0\.moe\.router"),
        (r"layers\.0\..*", "has 3 MoE layers"),
    ],
)
def test_a_pattern_that_does_not_fit_is_a_usage_error(writer: TraceWriter, pattern: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        Recorder(Model(), pattern, writer)


class Called(nn.Module):
    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return x + top_k_index + top_k_weights


def test_experts_called_with_ids_are_watched_and_else_the_router_beside_them() -> None:
    def linear() -> nn.Module:
        return nn.Linear(2, 2)

    blocks = [
        linear(),
        nn.ModuleDict({"experts": Called(), "gate": linear()}),
        nn.ModuleDict({"experts": nn.ModuleList([linear()]), "gate": linear()}),
        nn.ModuleDict({"experts": linear(), "router": linear()}),
        nn.ModuleDict({"experts": linear()}),
    ]
    layers = nn.ModuleList(nn.ModuleDict({"mlp": block}) for block in blocks)
    found = moe_layers(nn.ModuleDict({"layers": layers}))
    assert [(layer.name, layer.at_input) for layer in found] == [
        ("layers.1.mlp.experts", True),
        ("layers.2.mlp.gate", False),
        ("layers.3.mlp.router", False),
    ]
    assert hidden_layers(found) == (1, 2, 3)


def test_a_model_without_experts_is_refused_with_names_that_may_be_meant() -> None:
    model = nn.ModuleDict({"my_gate": nn.Linear(2, 2)})
    with pytest.raises(UsageError, match=r"ModuleDict has no MoE layer.*\(pattern=, or --router.*my_gate"):
        moe_layers(model)


def test_a_pattern_matches_the_names_inside_a_model_wrapped_for_data_parallelism() -> None:
    inner = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"router": nn.Linear(2, 2)})])})
    whole = nn.ModuleDict({"module": inner})
    for pattern in (r"layers\.\d+\.router", r"module\.layers\.\d+\.router"):
        assert [layer.name for layer in moe_layers(whole, pattern)] == ["module.layers.0.router"]
    other = nn.ModuleDict({"module": inner, "head": nn.Linear(2, 2)})
    with pytest.raises(UsageError, match="matches no module"):
        moe_layers(other, r"layers\.\d+\.router")


def test_the_example_of_the_documentation_records_a_bare_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[3] / "docs/recording.md").read_text()
    (example,) = (block for block in re.findall("```python\n(.*?)```", text, re.DOTALL) if "class Layer" in block)
    exec(example, {"__name__": "example"})
    trace = open_trace("traces")
    assert (trace.num_tokens, trace.model.num_layers, trace.model.name) == (128, 2, "mine")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("model.layers.3.mlp.experts", "model.layers.5.mlp.experts"), (3, 5)),
        (("h4.experts", "h9.experts"), (0, 1)),
        (("stages.0.layers.1.moe", "stages.1.layers.0.moe"), (0, 1)),
        (("2.moe", "7.moe"), (2, 7)),
        (("experts",), (0,)),
    ],
)
def test_hidden_layers_are_last_numbers_of_names_that_ascend(names: tuple[str, ...], expected: tuple[int, ...]) -> None:
    assert hidden_layers([MoELayer(name, nn.Identity()) for name in names]) == expected


def share(sample: int) -> float:
    """The hash of a sample over 2^64, in plain integers."""
    return int(mixed(np.array([sample]))[0]) / 2**64


@given(st.lists(st.integers(0, 2**62), max_size=20), st.floats(0.01, 0.99))
def test_a_sample_is_kept_by_the_hash_of_its_id_alone(samples: list[int], rate: float) -> None:
    assert sampled(np.array(samples, np.int64), rate).tolist() == [share(sample) < rate for sample in samples]


def test_the_share_is_about_the_rate_and_tells_nothing_of_the_split() -> None:
    ids = np.concatenate([(rank << 40) + np.arange(5000) for rank in range(4)])
    kept = sampled(ids, 0.3)
    assert kept.mean() == pytest.approx(0.3, abs=0.02)
    assert fitted(ids[kept], seed=0, fraction=0.5).mean() == pytest.approx(0.5, abs=0.03)


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 9)), max_size=12),
    st.sampled_from([0.3, 1.0]),
    st.one_of(st.none(), st.integers(1, 8)),
    st.integers(0, 9),
)
def test_rows_are_those_without_padding_of_kept_samples_up_to_the_bound(
    tokens: list[tuple[int, int]], rate: float, bound: int | None, before: int
) -> None:
    position = np.array([at for at, _ in tokens], np.int32)
    sample = np.array([name for _, name in tokens], np.int64)
    wanted = [row for row, (at, name) in enumerate(tokens) if at >= 0 and (rate == 1 or share(name) < rate)]
    if bound is not None:
        wanted = wanted[: max(0, bound - before)]
    kept = Kept(sample_rate=rate, max_tokens=bound)
    if not kept.full(before):
        rows = kept.rows(position, sample, before)
        assert list(range(len(tokens)) if rows is None else rows) == wanted


def test_a_share_of_unnamed_samples_is_refused() -> None:
    with pytest.raises(UsageError, match="needs sample ids"):
        Kept(sample_rate=0.5).rows(np.zeros(3, np.int32), None, 0)


def scalars(first: int, tokens: int) -> TokenBatch:
    position, no_ids = np.arange(first, first + tokens, dtype=np.int32), np.empty(0, np.uint16)
    return TokenBatch(None, position.astype(np.int64), position, None, np.zeros(tokens, np.int8), no_ids)


def test_files_are_bounded_and_hold_all_tokens_in_order(tmp_path: Path) -> None:
    states = np.random.default_rng(0).random((10, 8)).astype(np.float16)
    with EmbeddingWriter(tmp_path, [2], rank=5, max_bytes=100) as writer:
        for first in range(0, 10, 2):
            writer.append(scalars(first, 2), {2: states[first : first + 2]})
    paths = sorted(tmp_path.iterdir(), key=lambda path: path.name)
    parts = [load_file(path) for path in paths]
    assert len(paths) == 3
    assert all(path.name.startswith("embeddings-5-") and path.suffix == ".safetensors" for path in paths)
    assert all(part.keys() == {"sample", "position", "layer_2"} for part in parts)
    np.testing.assert_array_equal(np.concatenate([part["layer_2"] for part in parts]), states)
    assert np.concatenate([part["position"] for part in parts]).tolist() == [*range(10)]
    with pytest.raises(StorageError, match="embeddings-5-"), EmbeddingWriter(paths[0], [0]) as lost:
        lost.append(scalars(0, 2), {0: np.zeros((2, 8), np.float16)})


def test_nothing_is_written_of_no_layer_or_no_token(tmp_path: Path) -> None:
    with EmbeddingWriter(tmp_path, []) as none, EmbeddingWriter(tmp_path, [0]) as empty:
        none.append(scalars(0, 2), {})
        empty.append(scalars(0, 0), {0: np.empty((0, 8), np.float16)})
    assert not list(tmp_path.iterdir())


def test_layers_are_all_or_ordinals() -> None:
    assert embedded_layers("all", 3) == (0, 1, 2)
    assert embedded_layers("", 3) == ()
    assert embedded_layers("2,0,2", 3) == embedded_layers([2, 0], 3) == (0, 2)
    for text in ("3", "0,,1", "-1", "first"):
        with pytest.raises(UsageError, match="0 to 2"):
            embedded_layers(text, 3)
