"""The network and its workers: a namespace a node, each on a shaped link to a bridge, and a process a rank in these.

The bridge has a namespace of its own. The machine's own interfaces, addresses and routes are not touched: all that is
made lies in namespaces called `moeplan-PID-...`, and goes with them. Those of a process that was killed are removed by
the next start.

Workers are joined over gloo with one thread each: with gloo's two, queued collectives overlap and share the link; with
one they follow each other, the one channel that models of pipelining assume. Ranks run before everything else on the
machine (SCHED_RR): they mostly wait, and at each of their many turns would otherwise wait for others' slices of 4 ms
too. So whatever computes belongs elsewhere.
"""

import contextlib
import ctypes
import datetime
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moeplan.errors import UsageError
from moeplan.profilers.cluster import Cluster, Link
from moeplan.profilers.world.local_ranks import Channel, Progress, run_ranks

INTERFACE = "moeplan0"  # of every node
MAX_NODES = 250
TCP = ("tcp_congestion_control=reno", "tcp_slow_start_after_idle=0")  # neither probes a link that is known
NAMED = re.compile(r"moeplan-(\d+)-(?:hub|\d+)")
NAMESPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000
HELD = {signal.SIGINT, signal.SIGTERM}
TIMEOUT_S = 1800.0  # of a whole case
CALL_TIMEOUT_S = 60.0  # of a collective
BACKEND = "gloo_one"
Report = Callable[[Any], None]
Target = Callable[[Cluster, int, Any, Report], Any]  # (cluster, rank, payload, report)


@dataclass(frozen=True, slots=True)
class Wire:
    """What joins a node to the bridge, shaped alike in both directions.

    Parameters
    ----------
    rate_mbps
        Megabits a second.
    burst_bytes
        What may pass at once after a pause; a frame at least.
    """

    rate_mbps: float
    burst_bytes: int = 32_768
    frame_bytes: int = 9000

    @property
    def s_per_byte(self) -> float:
        """Seconds a byte, Ethernet's and TCP's headers not counted."""
        return 8e-6 / self.rate_mbps


WIRE = Wire(100.0)  # slow, so that two cores keep up with what eight ranks send


def linked(cluster: Cluster) -> Cluster:
    """The cluster with the links that are set up, by which ranks decide; those of a node share its link."""
    inter = Link(1e-3, cluster.devices_per_node * WIRE.s_per_byte)
    return replace(cluster, links={"intra": Link(3e-4, 1 / 1.5e9), "inter": inter})


@contextlib.contextmanager
def network(num_nodes: int, wire: Wire) -> Iterator[tuple[str, ...]]:
    """The namespaces of the nodes, which are there for the block; SIGTERM ends it as Ctrl-C does.

    Raises
    ------
    UsageError
        No root, no `ip` or `tc`, more nodes than addresses, or the kernel refuses.
    """
    _check(num_nodes)
    _remove(stale(_names()))
    mine = [f"moeplan-{os.getpid()}-{node}" for node in ("hub", *range(num_nodes))]
    with _ended_by_sigterm():
        try:
            _build(mine, wire)
            yield tuple(mine[1:])
        finally:
            held = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)  # cleaning up ends what it began
            _remove([name for name in _names() if name in mine])
            signal.pthread_sigmask(signal.SIG_SETMASK, held)


def enter(namespace: str) -> None:
    """Move this thread, and threads and processes that it starts later, into a namespace."""
    with (NAMESPACES / namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise UsageError(f"namespace {namespace} cannot be entered: {os.strerror(ctypes.get_errno())}")


def stale(names: list[str]) -> list[str]:
    """Namespaces that an emulated cluster left whose process is gone."""
    found = [match for name in names if (match := NAMED.fullmatch(name))]
    return [match[0] for match in found if not Path(f"/proc/{match[1]}").exists()]


def commands(names: list[str], wire: Wire) -> list[str]:
    """What makes the network, in order; the first name is the bridge's."""
    hub, *nodes = names
    shaped = f"root tbf rate {wire.rate_mbps * 1e6:.0f}bit burst {wire.burst_bytes}b limit 16mb"
    lines = [f"ip netns add {name}" for name in names]
    lines += [f"ip -n {hub} link add bridge0 type bridge", f"ip -n {hub} link set bridge0 up"]
    for at, node in enumerate(nodes):
        lines += [
            f"ip -n {hub} link add port{at} type veth peer name {INTERFACE} netns {node}",
            f"ip -n {hub} link set port{at} master bridge0 mtu {wire.frame_bytes} up",
            f"ip -n {node} address add 10.0.0.{at + 1}/24 dev {INTERFACE}",
            f"ip -n {node} link set {INTERFACE} mtu {wire.frame_bytes} up",
            f"ip -n {node} link set lo up",
            f"tc -n {node} qdisc add dev {INTERFACE} {shaped}",
            f"tc -n {hub} qdisc add dev port{at} {shaped}",
            *(f"ip netns exec {node} sysctl -q -w net.ipv4.{setting}" for setting in TCP),
        ]
    return lines


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


def _check(num_nodes: int) -> None:
    if not 1 <= num_nodes <= MAX_NODES:
        raise UsageError(f"{num_nodes} nodes; an emulated cluster has 1 to {MAX_NODES}")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise UsageError(f"no {' and no '.join(missing)}; an emulated cluster needs both (package iproute2)")
    if os.geteuid() != 0:
        raise UsageError("not root; an emulated cluster makes network namespaces, run it with sudo")


def _build(names: list[str], wire: Wire) -> None:
    for line in commands(names, wire):
        done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise UsageError(
                f"`{line}` failed: {done.stderr.strip()}; an emulated cluster needs a kernel with network namespaces,"
                " bridges, veth and tbf, and a container the right to them"
            )


def _names() -> list[str]:
    return sorted(path.name for path in NAMESPACES.iterdir()) if NAMESPACES.is_dir() else []


def _remove(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Any = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
