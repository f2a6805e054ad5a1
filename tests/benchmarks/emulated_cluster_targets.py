"""What ranks of emulated clusters run in tests; a module of its own, so that started processes can import it."""

import os
import signal
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.emulated_cluster.timing import interleaved
from moeplan.profilers.cluster import Cluster


def moves(_cluster: Cluster, rank: int, num_bytes: int, _report: Any) -> tuple[float, float, str]:
    """Median seconds of sending bytes to the other node, of sending them to oneself, and the sum that arrived."""
    size = dist.get_world_size()
    sent = torch.full((size, num_bytes), rank + 1, dtype=torch.uint8)
    arrived = torch.zeros_like(sent)
    alone = torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    mine = [num_bytes if peer == rank else 0 for peer in range(size)]
    found = interleaved(
        {
            "all": lambda: dist.all_to_all_single(arrived, sent),
            "own": lambda: dist.all_to_all_single(*alone, mine, mine),
        },
        5,
    )
    return found["all"].median, found["own"].median, str(np.unique(arrived.numpy(), axis=1).ravel().tolist())


def within_node(cluster: Cluster, rank: int, num_bytes: int, _report: Any) -> float:
    """Median seconds of sending bytes to the other ranks of the own node."""
    group = cluster.devices_per_node
    splits = [num_bytes if peer // group == rank // group else 0 for peer in range(cluster.num_devices)]
    sent = torch.zeros(sum(splits), dtype=torch.uint8)
    arrived = torch.zeros_like(sent)
    found = interleaved({"node": lambda: dist.all_to_all_single(arrived, sent, splits, splits)}, 5)
    return found["node"].median


def killed(_cluster: Cluster, rank: int, _payload: None, _report: Any) -> None:
    """Rank 1 dies; the others wait for it."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
