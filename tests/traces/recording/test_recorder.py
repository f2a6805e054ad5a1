"""The recorder on small torch modules whose routing is known."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moeplan.errors import InputError, UsageError
from moeplan.traces.model import ModelSpec
from moeplan.traces.reader import open_trace
from moeplan.traces.recording.layers import routers
from moeplan.traces.recording.recorder import Recorder, sample_ids
from moeplan.traces.schema import TraceMeta
from moeplan.traces.writer import TraceWriter

L, E, K, M = 3, 8, 2, 4
PATTERN = r"layers\.\d+\.moe\.router"


class LogitsRouter(nn.Linear):
    """Gives logits `[..., E]`."""

    def __init__(self) -> None:
        super().__init__(M, E, bias=False)


class TopKRouter(LogitsRouter):
    """Gives weights and ids `[T, K]`, smallest weight first."""

    def forward(self, x: Tensor) -> Any:
        weights, ids = super().forward(x).flatten(0, -2).softmax(-1).topk(K)
        return weights.flip(-1), ids.flip(-1)


class IdsRouter(LogitsRouter):
    """Gives ids only, in a tuple with something else."""

    def forward(self, x: Tensor) -> Any:
        return {"loss": 0.0}, super().forward(x).flatten(0, -2).topk(K).indices.int()


class Canned(nn.Module):
    """Gives the same whatever it gets."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, _: Tensor) -> Any:
        return self.output


class Block(nn.Module):
    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.moe = nn.ModuleDict({"router": router})


class Model(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(kind()) for _ in range(L))
        self.skip: int | None = None

    def forward(self, x: Tensor) -> None:
        for index, layer in enumerate(self.layers):
            if index != self.skip:
                layer.moe["router"](x)  # type: ignore[index, operator]


@pytest.fixture
def writer(tmp_path: Path) -> TraceWriter:
    model = ModelSpec(name="modules", layer_ids=tuple(range(L)), num_experts=E, top_k=K)
    return TraceWriter(tmp_path, TraceMeta(form="tokens", model=model, recorder="test"), weights=True)


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, M, generator=torch.Generator().manual_seed(1))


def expected_routing(model: Model, x: Tensor) -> tuple[Any, Any]:
    flat = x.flatten(0, -2)
    gates = [(flat @ layer.moe["router"].weight.T).softmax(-1).detach().topk(K) for layer in model.layers]  # type: ignore[index, union-attr]
    return np.stack([g.indices.numpy() for g in gates], 1), np.stack([g.values.numpy() for g in gates], 1)


def read(path: Path, **options: Any) -> Any:
    (batch,) = open_trace(path).batches(**options)
    return batch


def record(recorder: Recorder, model: Model, tokens: int, *, positions: int | None = None, passes: int = 1) -> None:
    with recorder.tokens(position=range(positions or tokens)):
        for _ in range(passes):
            model(inputs(tokens))


@pytest.mark.parametrize("kind", [LogitsRouter, TopKRouter])
def test_what_the_routers_chose_is_recorded_by_descending_weight(
    tmp_path: Path, writer: TraceWriter, kind: Callable[[], nn.Module]
) -> None:
    model, x = Model(kind), inputs(2, 5)
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
    model = Model(IdsRouter)
    with TraceWriter(tmp_path / "ids", writer.meta) as plain, Recorder(model, PATTERN, plain) as recorder:
        record(recorder, model, 6)
    batch = read(tmp_path / "ids")
    np.testing.assert_array_equal(batch.ids, expected_routing(model, inputs(6))[0])
    with Recorder(model, PATTERN, writer) as recorder, pytest.raises(InputError, match="no gate weights"):
        record(recorder, model, 6)


def test_nothing_is_recorded_outside_the_block_or_after_the_end(writer: TraceWriter) -> None:
    model = Model(LogitsRouter)
    with Recorder(model, PATTERN, writer) as recorder:
        model(inputs(4))
        record(recorder, model, 4)
    model(inputs(4))
    assert writer.num_tokens == 4
    assert not any(module._forward_hooks for module in model.modules())


def test_a_pass_that_fails_is_not_recorded_and_the_next_one_is(writer: TraceWriter) -> None:
    model = Model(LogitsRouter)
    with Recorder(model, PATTERN, writer) as recorder:
        with pytest.raises(RuntimeError), recorder.tokens(position=range(4)):
            model(inputs(4)[:, :2])
        record(recorder, model, 4)
    assert writer.num_tokens == 4


def test_a_router_that_did_not_run_or_ran_twice_or_on_other_tokens_is_named(writer: TraceWriter) -> None:
    model = Model(LogitsRouter)
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
    ],
)
def test_what_is_no_routing_is_refused_by_the_name_of_the_router(
    writer: TraceWriter, output: Any, expected: str
) -> None:
    model = Model(lambda: Canned(output))
    with Recorder(model, PATTERN, writer) as recorder, pytest.raises(InputError, match=expected) as refused:
        record(recorder, model, 4)
    assert "layers.0.moe.router" in str(refused.value)


def test_a_dropped_choice_is_recorded_as_not_routed(tmp_path: Path, writer: TraceWriter) -> None:
    model = Model(lambda: Canned((torch.tensor([[0.5, 0.2]] * 4), torch.tensor([[3, -1]] * 4))))
    with writer, Recorder(model, PATTERN, writer) as recorder:
        record(recorder, model, 4)
    batch = read(tmp_path)
    assert batch.ids[0, 0].tolist() == [3, 65_535]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("*.router", "no regular expression"), (r"h\.\d+", "matches no module"), (r"layers\.0\..*", "has 3 MoE layers")],
)
def test_a_pattern_that_does_not_fit_is_a_usage_error(writer: TraceWriter, pattern: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        Recorder(Model(LogitsRouter), pattern, writer)


def test_a_pattern_that_matches_nothing_suggests_names_of_routers() -> None:
    with pytest.raises(UsageError, match=r"layers\.0\.moe\.router"):
        routers(Model(LogitsRouter), "gate")


def test_samples_of_ranks_do_not_collide() -> None:
    assert sample_ids(3, [0, 5]).tolist() == [3 << 40, 3 << 40 | 5]
    assert sample_ids(3, [0]).dtype == np.int64
