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
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
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


class Checkpointed(nn.Module):
    """A model whose layers, or which as a whole, run again in the backward pass."""

    def __init__(self, inner: MoELanguageModel, *, whole: bool, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.config, self.whole, self.reentrant = inner, inner.config, whole, reentrant

    def forward(self, tokens_BS: Tensor) -> Tensor:
        if self.whole:
            scale = torch.ones((), requires_grad=True)
            return checkpoint(lambda s, t: self.inner(t) * s, scale, tokens_BS, use_reentrant=self.reentrant)  # type: ignore[no-any-return]
        x_BSM: Tensor = self.inner.embed(tokens_BS).requires_grad_()
        position_S = torch.arange(tokens_BS.shape[1])
        for layer in self.inner.layers:
            x_BSM = checkpoint(
                layer, x_BSM, position_S, position_S[:, None] >= position_S, use_reentrant=self.reentrant
            )
        return x_BSM


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_what_checkpointing_repeats_is_recorded_once(
    model: MoELanguageModel, tmp_path: Path, whole: bool, reentrant: bool
) -> None:
    outer = Checkpointed(model, whole=whole, reentrant=reentrant)
    with moeplan.traces.record(outer, tmp_path / "t"):
        for seed in range(3):
            train_step(outer, tokens(2, seed=seed))
    batch = read(tmp_path / "t")
    np.testing.assert_array_equal(batch.ids, np.concatenate([routing(model, tokens(2, seed=s)) for s in range(3)]))
    assert batch.step.tolist() == np.repeat(range(3), 10).tolist()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_alone_is_left_out_on_either_side(model: MoELanguageModel, tmp_path: Path, side: str) -> None:
    masked, tokens_BS = Masked(model).eval(), tokens(3)
    mask_BS = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    mask_BS = mask_BS.flip(1) if side == "left" else mask_BS
    with moeplan.traces.record(masked, tmp_path / "t"):
        masked(tokens_BS, attention_mask=mask_BS)
        masked(tokens_BS[:1], mask_BS[:1])
        for shape in ((2, 1, 5, 5), (2, 5, 5), (3, 5), (2, 4)):  # of pairs, of other tokens: no padding
            masked(tokens(2), torch.zeros(shape))
        with pytest.raises(InputError, match="without a tensor of tokens"):
            masked(input_ids=[1, 2])
    batch, real_T = read(tmp_path / "t"), mask_BS.flatten().bool().numpy()
    whole = routing(model, tokens_BS)[real_T]
    np.testing.assert_array_equal(batch.ids[:9], np.concatenate([whole, whole[:2]]))
    assert batch.sample[:9].tolist() == [0, 0, 1, 1, 1, 1, 1, 3, 3]
    assert batch.position.tolist() == [0, 1, *range(5), 0, 1, *([*range(5)] * 8)]


def test_the_pieces_of_a_packed_row_are_samples(model: MoELanguageModel, tmp_path: Path) -> None:
    masked = Masked(model)
    with moeplan.traces.record(masked, tmp_path / "t"):
        masked(tokens(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 0]]))
        masked(tokens(2, 3), position_ids=torch.arange(3)[None])
        masked(tokens(1, 3), position_ids=torch.tensor([[1, 2, 0]]))
    batch = read(tmp_path / "t")
    assert batch.sample.tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 3, 4, 4, 4, 5, 5, 6]
    assert batch.position.tolist() == [0, 1, 2, 0, 1, 0, 0, 1, 2, 0, 1, 2, 1, 2, 0]


def test_neither_warm_up_steps_nor_what_exceeds_the_bound_is_recorded(model: MoELanguageModel, tmp_path: Path) -> None:
    with moeplan.traces.record(model, tmp_path / "t", warmup_steps=2, max_tokens=8):
        for seed in range(6):
            model(tokens(1, seed=seed))
    batch = read(tmp_path / "t")
    assert batch.step.tolist() == batch.sample.tolist() == [2] * 5 + [3] * 3
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


class Plain(nn.Module):
    """A model that tells nothing of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x)  # type: ignore[no-any-return]


def test_a_model_that_does_not_tell_its_sizes_is_refused_unless_told(model: MoELanguageModel, tmp_path: Path) -> None:
    plain = Plain()
    with pytest.raises(UsageError, match="no MoE layer"), moeplan.traces.record(plain, tmp_path / "t"):
        pass
    with pytest.raises(UsageError, match="num_experts"), moeplan.traces.record(plain, tmp_path / "t", pattern="gate"):
        pass
    with pytest.raises(UsageError, match="0 to 2"), moeplan.traces.record(model, tmp_path / "t", embeddings=[3]):
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


def test_the_call_needs_a_model_and_a_path_and_its_package_has_no_other_names() -> None:
    required = [p.name for p in inspect.signature(moeplan.traces.record).parameters.values() if p.default is p.empty]
    assert required == ["model", "path"]
    with pytest.raises(AttributeError, match="no attribute 'recorded'"):
        moeplan.traces.recorded  # noqa: B018


TRAIN = """
import os, sys, torch
import torch.distributed as dist
torch.set_num_threads(1)
folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
import moeplan.traces
from moeplan.planner.demo.model import MoELanguageModel, ModelConfig
torch.manual_seed(0)
config = ModelConfig(vocab_size=32, num_layers=2, num_experts=6, hidden_size=16, ffn_size=8, num_heads=2)
model = MoELanguageModel(config)
parallel = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)
with moeplan.traces.record(parallel, f"{folder}/traces", sample_rate=0.7) as recorder:
    for step in range(3):
        optimizer.zero_grad()
        parallel(torch.randint(32, (4, 6), generator=generator)).square().mean().backward()
        optimizer.step()
    recorder.flush()
    dist.barrier()
    if rank == 1:
        print("ready", flush=True)
        import time
        time.sleep(60)
dist.destroy_process_group()
"""


def start(folder: Path, rank: int) -> "subprocess.Popen[str]":
    environ, pipe = {**os.environ, "OMP_NUM_THREADS": "1"}, subprocess.PIPE
    argv = [sys.executable, "-W", "ignore", "-c", TRAIN, str(folder), str(rank)]
    return subprocess.Popen(argv, env=environ, stdout=pipe, stderr=pipe, text=True)


def test_ranks_write_one_trace_without_coordination_of_which_one_killed_leaves_what_it_flushed(tmp_path: Path) -> None:
    ranks = [start(tmp_path, rank) for rank in range(2)]
    assert known(ranks[1].stdout).readline() == "ready\n"
    ranks[1].send_signal(signal.SIGKILL)
    for process in ranks:
        process.communicate(timeout=120)
    trace = open_trace(tmp_path / "traces")
    assert {int(name.split("-")[1]) for name in trace.files} == {0, 1}
    batches = list(trace.batches())
    sample, step, rank = (
        np.concatenate([getattr(b, name) for b in batches]) for name in ("sample", "step", "source_rank")
    )
    expected = np.concatenate([(rank << 40) + np.arange(12) for rank in range(2)])
    np.testing.assert_array_equal(np.sort(sample), np.repeat(expected[sampled(expected, 0.7)], 6))
    np.testing.assert_array_equal(sample >> 40, rank)
    np.testing.assert_array_equal((sample & 0xFFFFFFFF) // 4, step)
