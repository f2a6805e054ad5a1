"""`moeplan.traces.record` in training and other loops, on models whose routing is known."""

import inspect
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moeplan.traces
from moeplan.errors import InputError, UsageError
from moeplan.planner.demo.model import ModelConfig, MoELanguageModel
from moeplan.traces.model import ModelSpec
from moeplan.traces.reader import open_trace
from moeplan.traces.recording.kept import sampled
from tests.builders import known

CONFIG = ModelConfig(vocab_size=32, num_layers=3, num_experts=6, top_k=2, hidden_size=16, ffn_size=8, num_heads=2)


@pytest.fixture
def model() -> MoELanguageModel:
    torch.manual_seed(0)
    return MoELanguageModel(CONFIG)


class Masked(nn.Module):
    """The embedded model under the names that transformers gives to arguments."""

    def __init__(self, inner: MoELanguageModel) -> None:
        super().__init__()
        self.inner = inner
        self.config = inner.config

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        del attention_mask, position_ids
        return self.inner(input_ids)  # type: ignore[no-any-return]


def tokens(rows: int, columns: int = 5, seed: int = 1) -> Tensor:
    return torch.randint(32, (rows, columns), generator=torch.Generator().manual_seed(seed))


def read(path: Path) -> Any:
    (batch,) = open_trace(path).batches()
    return batch


def routing(model: MoELanguageModel, tokens_BS: Tensor) -> Any:
    """Ids `[T, L, K]` by a second pass with hooks of its own."""
    seen: list[Tensor] = []
    handles = [router.register_forward_hook(lambda _, __, output: seen.append(output[1])) for router in model.routers]
    with torch.no_grad():
        model(tokens_BS)
    for handle in handles:
        handle.remove()
    return torch.stack(seen, 1).numpy()


def train_step(model: nn.Module, tokens_BS: Tensor, optimizer: Any = None) -> None:
    model(tokens_BS).square().mean().backward()
    if optimizer is not None:
        optimizer.step()


def test_two_lines_record_a_training_loop(model: MoELanguageModel, tmp_path: Path) -> None:
    with moeplan.traces.record(model, tmp_path / "t", rank=3):
        for seed in range(4):
            train_step(model, tokens(2, seed=seed))
    batch = read(tmp_path / "t")
    expected = [routing(model, tokens(2, seed=seed)) for seed in range(4)]
    np.testing.assert_array_equal(batch.ids, np.concatenate(expected))
    assert batch.step.tolist() == np.repeat(range(4), 10).tolist()
    assert batch.sample.tolist() == (np.repeat(range(8), 5) + (3 << 40)).tolist()
    assert batch.position.tolist() == [*range(5)] * 8
    assert set(batch.source_rank.tolist()) == {3}
    assert set(batch.phase.tolist()) == {2}
    known = replace(model.config.spec(), name="MoELanguageModel", num_mtp_layers=None)
    assert open_trace(tmp_path / "t").model == known


def test_the_model_runs_as_before_when_the_block_is_left(model: MoELanguageModel, tmp_path: Path) -> None:
    with moeplan.traces.record(model, tmp_path / "t"):
        model(tokens(1))
    model(tokens(1))
    assert open_trace(tmp_path / "t").num_tokens == 5
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_repeats_is_recorded_once(model: MoELanguageModel, tmp_path: Path, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model.layers
            self.config = model.config

        def forward(self, tokens_BS: Tensor) -> Tensor:
            x_BSM: Tensor = model.embed(tokens_BS).requires_grad_()
            position_S = torch.arange(tokens_BS.shape[1])
            for layer in self.layers:
                x_BSM = checkpoint(layer, x_BSM, position_S, position_S[:, None] >= position_S, use_reentrant=reentrant)
            return x_BSM

    outer = Checkpointed()
    with moeplan.traces.record(outer, tmp_path / "t"):
        for seed in range(3):
            train_step(outer, tokens(2, seed=seed))
    np.testing.assert_array_equal(
        read(tmp_path / "t").ids, np.concatenate([routing(model, tokens(2, seed=seed)) for seed in range(3)])
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_whole_model_is_recorded_once(model: MoELanguageModel, tmp_path: Path, reentrant: bool) -> None:
    scale = torch.ones((), requires_grad=True)
    with moeplan.traces.record(model, tmp_path / "t"):
        for seed in range(2):
            y = checkpoint(lambda s, t: model(t) * s, scale, tokens(2, seed=seed), use_reentrant=reentrant)
            y.square().mean().backward()
    batch = read(tmp_path / "t")
    assert len(batch) == 20
    assert set(batch.step.tolist()) == {0, 1}


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_left_out_on_either_side(model: MoELanguageModel, tmp_path: Path, side: str) -> None:
    masked, tokens_BS = Masked(model).eval(), tokens(3)
    mask_BS = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    mask_BS = mask_BS.flip(1) if side == "left" else mask_BS
    with moeplan.traces.record(masked, tmp_path / "t"):
        masked(tokens_BS, attention_mask=mask_BS)
        masked(tokens_BS[:1], mask_BS[:1])
    batch, real_T = read(tmp_path / "t"), mask_BS.flatten().bool().numpy()
    whole = routing(model, tokens_BS)[real_T]
    np.testing.assert_array_equal(batch.ids, np.concatenate([whole, whole[:2]]))
    assert batch.sample.tolist() == [0, 0, 1, 1, 1, 1, 1, 3, 3]
    assert batch.position.tolist() == [0, 1, *range(5), 0, 1]


@pytest.mark.parametrize("shape", [(2, 1, 5, 5), (2, 5, 5), (3, 5), (2, 4)])
def test_a_mask_of_pairs_or_more_is_no_padding(model: MoELanguageModel, tmp_path: Path, shape: tuple[int, ...]) -> None:
    masked = Masked(model)
    with moeplan.traces.record(masked, tmp_path / "t"):
        masked(tokens(2), torch.zeros(shape))
    assert len(read(tmp_path / "t")) == 10


def test_the_pieces_of_a_packed_row_are_samples(model: MoELanguageModel, tmp_path: Path) -> None:
    masked = Masked(model)
    with moeplan.traces.record(masked, tmp_path / "t"):
        masked(tokens(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 0]]))
        masked(tokens(2, 3), position_ids=torch.arange(3)[None])
        masked(tokens(1, 3), position_ids=torch.tensor([[1, 2, 0]]))
    batch = read(tmp_path / "t")
    assert batch.sample.tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 3, 4, 4, 4, 5, 5, 6]
    assert batch.position.tolist() == [0, 1, 2, 0, 1, 0, 0, 1, 2, 0, 1, 2, 1, 2, 0]


def test_warm_up_steps_are_counted_and_not_recorded(model: MoELanguageModel, tmp_path: Path) -> None:
    with moeplan.traces.record(model, tmp_path / "t", warmup_steps=2):
        for seed in range(4):
            model(tokens(1, seed=seed))
    batch = read(tmp_path / "t")
    assert batch.step.tolist() == [2] * 5 + [3] * 5
    assert batch.sample.tolist() == [2] * 5 + [3] * 5
    np.testing.assert_array_equal(batch.ids[:5], routing(model, tokens(1, seed=2)))


def test_the_optimizer_may_end_the_step(model: MoELanguageModel, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with moeplan.traces.record(model, tmp_path / "t", step_per_forward=False) as recorder:
        optimizer.register_step_post_hook(recorder.step)
        for number in range(6):
            train_step(model, tokens(1), optimizer if number % 3 == 2 else None)
    batch = read(tmp_path / "t")
    assert batch.step.tolist() == [0] * 15 + [1] * 15


def test_a_share_of_samples_is_the_same_each_time_and_other_ids_than_those_that_are_fitted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, kept = MoELanguageModel(CONFIG), []
    for name in "ab":
        with moeplan.traces.record(model, tmp_path / name, sample_rate=0.3, rank=1):
            for seed in range(8):
                model(tokens(5, seed=seed))
        batch = read(tmp_path / name)
        kept.append(batch.sample.tolist())
    ids = (1 << 40) + np.arange(40)
    assert kept[0] == kept[1] == np.repeat(ids[sampled(ids, 0.3)], 5).tolist()
    assert 0 < len(kept[0]) < 200


def test_the_bound_on_tokens_is_met_exactly_and_the_loop_goes_on(model: MoELanguageModel, tmp_path: Path) -> None:
    with moeplan.traces.record(model, tmp_path / "t", max_tokens=13):
        for seed in range(4):
            train_step(model, tokens(2, seed=seed))
    whole = np.concatenate([routing(model, tokens(2, seed=seed)) for seed in range(2)])
    np.testing.assert_array_equal(read(tmp_path / "t").ids, whole[:13])


def test_embeddings_are_what_entered_the_layers(model: MoELanguageModel, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    entered: list[Any] = []
    model.routers[1].register_forward_pre_hook(lambda _, args: entered.append(args[0].detach().numpy().copy()))
    with moeplan.traces.record(model, tmp_path / "t", embeddings=[1], sample_rate=0.5):
        model(tokens(6))
        model(tokens(2, seed=5))
    (path,) = (tmp_path / "t").glob("embeddings-0-*-0.safetensors")
    sidecar, batch = load_file(path), read(tmp_path / "t")
    kept_T = sampled(np.repeat(np.arange(8), 5), 0.5)
    assert sidecar.keys() == {"step", "sample", "position", "layer_1"}
    np.testing.assert_array_equal(sidecar["layer_1"], np.concatenate(entered)[kept_T].astype(np.float16))
    np.testing.assert_array_equal(sidecar["sample"], batch.sample)
    np.testing.assert_array_equal(sidecar["position"], batch.position)


def test_embeddings_of_a_layer_that_is_not_there_are_refused(model: MoELanguageModel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="0 to 2"), moeplan.traces.record(model, tmp_path / "t", embeddings=[3]):
        pass
    assert not (tmp_path / "t").exists()


def test_any_router_can_be_named(model: MoELanguageModel, tmp_path: Path) -> None:
    with moeplan.traces.record(model, tmp_path / "t", pattern=r"layers\.[12]\.moe\.router\.gate"):
        model(tokens(2))
    np.testing.assert_array_equal(read(tmp_path / "t").ids, routing(model, tokens(2))[:, 1:])
    assert open_trace(tmp_path / "t").model.layer_ids == (1, 2)


class Plain(nn.Module):
    """A model that tells nothing of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x)  # type: ignore[no-any-return]


def test_a_model_that_does_not_tell_its_sizes_is_refused_unless_they_are_given(tmp_path: Path) -> None:
    plain = Plain()
    with pytest.raises(UsageError, match="no MoE layer"), moeplan.traces.record(plain, tmp_path / "t"):
        pass
    with pytest.raises(UsageError, match="num_experts"), moeplan.traces.record(plain, tmp_path / "t", pattern="gate"):
        pass
    assert not (tmp_path / "t").exists()
    spec = ModelSpec(name="plain", layer_ids=(0,), num_experts=6, top_k=2)
    with moeplan.traces.record(plain, tmp_path / "t", pattern="gate", spec=spec):
        plain(torch.randn(2, 3, 4))
    assert len(read(tmp_path / "t")) == 6


def test_a_failed_pass_is_not_recorded_and_a_failed_loop_keeps_others(model: MoELanguageModel, tmp_path: Path) -> None:
    def diverges() -> None:
        with moeplan.traces.record(model, tmp_path / "t"):
            with pytest.raises(IndexError):
                model(tokens(1) + 100)
            model(tokens(1))
            raise RuntimeError("loss is nan")

    with pytest.raises(RuntimeError, match="loss is nan"):
        diverges()
    np.testing.assert_array_equal(read(tmp_path / "t").ids, routing(model, tokens(1)))


def test_a_call_without_tokens_says_so(model: MoELanguageModel, tmp_path: Path) -> None:
    masked = Masked(model)
    with moeplan.traces.record(masked, tmp_path / "t"), pytest.raises(InputError, match="without a tensor of tokens"):
        masked(input_ids=[1, 2])


def test_the_call_needs_a_model_and_a_path_and_its_package_is_light() -> None:
    required = [p.name for p in inspect.signature(moeplan.traces.record).parameters.values() if p.default is p.empty]
    assert required == ["model", "path"]
    code = "import sys, moeplan.traces; print(sorted({'numpy', 'pydantic', 'torch', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'recorded'"):
        moeplan.traces.recorded  # noqa: B018


WORLD = 2
TRAIN = """
import os, sys, torch
import torch.distributed as dist
torch.set_num_threads(1)
folder, rank, world, steps = sys.argv[1], *map(int, sys.argv[2:5])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
import moeplan.traces
from moeplan.planner.demo.model import MoELanguageModel, ModelConfig
torch.manual_seed(0)
config = ModelConfig(vocab_size=32, num_layers=2, num_experts=6, hidden_size=16, ffn_size=8, num_heads=2)
model = MoELanguageModel(config)
parallel = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)
with moeplan.traces.record(parallel, f"{folder}/traces", sample_rate=0.7) as recorder:
    for step in range(steps):
        optimizer.zero_grad()
        parallel(torch.randint(32, (4, 6), generator=generator)).square().mean().backward()
        optimizer.step()
        if sys.argv[5:] and step == 2:
            recorder.flush()
            dist.barrier()
            if rank == 1:
                print("ready", flush=True)
                import time
                time.sleep(60)
dist.destroy_process_group()
"""


def start(folder: Path, rank: int, steps: int, *rest: str) -> "subprocess.Popen[str]":
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-W", "ignore", "-c", TRAIN, str(folder), str(rank), str(WORLD), str(steps), *rest]
    return subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def columns(path: Path) -> tuple[Any, Any, Any]:
    """Sample, step and source rank `[T]` of all parts."""
    batches = list(open_trace(path).batches())
    sample, step, rank = zip(*((batch.sample, batch.step, batch.source_rank) for batch in batches), strict=True)
    return np.concatenate(sample), np.concatenate(step), np.concatenate(rank)


def test_ranks_that_train_together_write_one_trace_without_coordination(tmp_path: Path) -> None:
    ranks = [start(tmp_path, rank, 5) for rank in range(WORLD)]
    for process in ranks:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert {int(name.split("-")[1]) for name in open_trace(tmp_path / "traces").files} == {*range(WORLD)}
    sample, step, source_rank = columns(tmp_path / "traces")
    expected = np.concatenate([(rank << 40) + np.arange(20) for rank in range(WORLD)])
    kept = np.repeat(expected[sampled(expected, 0.7)], 6)
    np.testing.assert_array_equal(np.sort(sample), kept)
    np.testing.assert_array_equal(sample >> 40, source_rank)
    np.testing.assert_array_equal((sample & 0xFFFFFFFF) // 4, step)


def test_a_rank_that_is_killed_leaves_what_it_flushed_and_the_others_whole(tmp_path: Path) -> None:
    ranks = [start(tmp_path, rank, 3, "wait") for rank in range(WORLD)]
    assert known(ranks[1].stdout).readline() == "ready\n"
    ranks[1].send_signal(signal.SIGKILL)
    for process in ranks:
        process.communicate(timeout=120)
    _, step, source_rank = columns(tmp_path / "traces")
    for rank in range(WORLD):
        assert set(step[source_rank == rank].tolist()) == {0, 1, 2}
