"""Several ranks record one data set, each in a process of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from moeplan.traces.reader import open_trace
from moeplan.traces.recording.kept import sampled

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
    assert ranks[1].stdout is not None
    assert ranks[1].stdout.readline() == "ready\n"
    ranks[1].send_signal(signal.SIGKILL)
    for process in ranks:
        process.communicate(timeout=120)
    _, step, source_rank = columns(tmp_path / "traces")
    for rank in range(WORLD):
        assert set(step[source_rank == rank].tolist()) == {0, 1, 2}
