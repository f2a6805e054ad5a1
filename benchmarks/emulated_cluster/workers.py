"""The workers: a process a rank in the namespace of its node, joined over gloo with one worker thread each.

With gloo's two threads queued collectives overlap and share the link; with one they follow each other, the one channel
that models of pipelining assume. Ranks run before everything else on the machine (SCHED_RR): they mostly wait, and at
each of their many turns would otherwise wait for others' slices of 4 ms too. So whatever computes belongs elsewhere.
"""

import contextlib
import datetime
import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any

from moeplan.profilers.cluster import Cluster
from moeplan.profilers.world.local_ranks import Channel, Progress, run_ranks

from .network import INTERFACE, Wire, enter, network

TIMEOUT_S = 1800.0  # of a whole case
CALL_TIMEOUT_S = 60.0  # of a collective
BACKEND = "gloo_one"
Report = Callable[[Any], None]
Target = Callable[[Cluster, int, Any, Report], Any]  # (cluster, rank, payload, report)


def run_cluster(
    cluster: Cluster, wire: Wire, target: Target, payload: Any = None, *, on_progress: Progress | None = None
) -> list[Any]:
    """The results of `target(cluster, rank, payload, report)` on every rank of an emulated cluster, by rank.

    Raises
    ------
    UsageError
        As `network` says.
    RankError
        A rank died, hung or failed; all others are ended, and nothing is left.
    """
    with network(cluster.num_nodes, wire) as nodes, tempfile.TemporaryDirectory(prefix="moeplan-") as folder:
        entry = functools.partial(_rank, cluster, nodes, f"{folder}/store", target, payload)
        return run_ranks(cluster.num_devices, entry, timeout_s=TIMEOUT_S, on_progress=on_progress)


def _rank(
    cluster: Cluster, nodes: tuple[str, ...], store: str, target: Target, payload: Any, rank: int, channel: Channel
) -> None:
    enter(nodes[rank // cluster.devices_per_node])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with contextlib.suppress(PermissionError):  # what else the machine does is not to be measured
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.Backend.register_backend(BACKEND, _one_thread, extended_api=True, devices=["cpu"])
    meeting = dist.FileStore(store, cluster.num_devices)  # type: ignore[attr-defined]  # nodes share the file system
    timeout = datetime.timedelta(seconds=CALL_TIMEOUT_S)
    dist.init_process_group(BACKEND, store=meeting, rank=rank, world_size=cluster.num_devices, timeout=timeout)
    channel.greet()
    channel.deliver(target(cluster, rank, payload, channel.report if rank == 0 else _ignore))


def _one_thread(given: Any, _options: Any) -> Any:
    """A gloo group with one worker thread."""
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(interface=INTERFACE)]
    options._threads = 1
    options._timeout = given.timeout
    return ProcessGroupGloo(given.store, given.group_rank, given.group_size, options)


def _ignore(_value: Any) -> None:
    """Where progress goes that nobody asked for."""
