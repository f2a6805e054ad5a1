"""The emulated cluster: its model, and its network, in which bytes move at the shaped rate."""

import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.emulated_cluster.model import STRIDE, EmulatedModel, Sizes, Waiter
from benchmarks.emulated_cluster.network import NAMESPACES, Wire, commands, network, run_cluster
from benchmarks.emulated_cluster.overhead import two_all_to_alls
from benchmarks.emulated_cluster.timing import interleaved
from moeplan.errors import RankError, UsageError
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.world import World, run_world
from tests.builders import known

NUM_BYTES = 400_000  # 64 ms at 50 Mbit/s
HELD = """
import time
from benchmarks.emulated_cluster.network import Wire, network
with network(2, Wire(50)):
    print(1, flush=True)
    time.sleep(99)
"""


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


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Network namespaces can be made here; what tests with them leave behind fails them."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("an emulated cluster needs root, ip and tc")
    name = f"moeplan-{os.getpid()}-0"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces cannot be made here")
    subprocess.run(["ip", "netns", "delete", name], check=True)


def left(pid: int) -> list[str]:
    """The namespaces of a process that are there."""
    there = NAMESPACES.iterdir() if NAMESPACES.is_dir() else ()
    return [path.name for path in there if path.name.startswith(f"moeplan-{pid}-")]


@pytest.mark.usefixtures("namespaces")
def test_bytes_between_nodes_move_at_the_shaped_rate_in_both_directions_and_arrive() -> None:
    results = run_cluster(Cluster(2, 1), Wire(50.0), moves, NUM_BYTES)
    for all_s, own_s, arrived in results:
        assert 0.75 < all_s / (NUM_BYTES * Wire(50.0).s_per_byte) < 2.0  # unshaped: 50 times as fast
        assert own_s < all_s / 10
        assert arrived == "[1, 2]"
    assert left(os.getpid()) == []


@pytest.mark.usefixtures("namespaces")
def test_bytes_inside_a_node_are_not_shaped() -> None:
    (first_s, *_) = run_cluster(Cluster(1, 2), Wire(2.0), within_node, NUM_BYTES)
    assert first_s < NUM_BYTES * Wire(2.0).s_per_byte / 10  # 1.6 s if it were


@pytest.mark.usefixtures("namespaces")
def test_a_killed_rank_is_named_and_nothing_is_left() -> None:
    with pytest.raises(RankError, match="rank 1 died"):
        run_cluster(Cluster(2, 1), Wire(50.0), killed)
    assert left(os.getpid()) == []


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(by: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", HELD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as holder:
        assert known(holder.stdout).readline() == b"1\n"
        assert len(left(holder.pid)) == 3
        holder.send_signal(by)
        holder.wait(30)
    assert left(holder.pid) == []


@pytest.mark.usefixtures("namespaces")
def test_what_a_killed_process_left_is_removed_by_the_next_start_and_a_living_one_keeps_its_own() -> None:
    with subprocess.Popen([sys.executable, "-c", HELD], stdout=subprocess.PIPE) as killed:
        assert known(killed.stdout).readline() == b"1\n"
        with network(1, Wire(50.0)):
            assert len(left(killed.pid)) == 3
        killed.kill()
    assert len(left(killed.pid)) == 3
    with network(1, Wire(50.0)):
        assert left(killed.pid) == []


def test_every_link_is_shaped_at_both_ends_at_the_rate_asked_for() -> None:
    lines = commands(["hub", "a", "b"], Wire(25.0, 4096))
    shaped = [line for line in lines if " tbf " in line]
    assert [line.split()[2] for line in shaped] == ["a", "hub", "b", "hub"]
    assert all("rate 25000000bit burst 4096b" in line for line in shaped)
    assert Wire(25.0).s_per_byte == 8 / 25e6
    assert len({line.split()[5] for line in lines if " address " in line}) == 2


@pytest.mark.parametrize(
    ("missing", "user", "nodes", "told"),
    [
        ("ip", 0, 1, "no ip; .*iproute2"),
        ("tc", 0, 1, "no tc; .*iproute2"),
        (None, 1000, 1, "not root"),
        (None, 0, 251, "251 nodes"),
    ],
)
def test_without_tools_or_root_and_with_too_many_nodes_there_is_no_network(
    monkeypatch: pytest.MonkeyPatch, missing: str | None, user: int, nodes: int, told: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None if name == missing else name)
    monkeypatch.setattr("os.geteuid", lambda: user)
    with pytest.raises(UsageError, match=told), network(nodes, Wire(1.0)):
        pass


class Scaling(nn.Module):
    """Expert e multiplies by its factor, and counts what it was asked for."""

    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.factors = torch.tensor(factors)

    def forward(self, x_TM: Tensor, ids_TK: Tensor, weight_TK: Tensor) -> Tensor:
        return (x_TM[:, None] * (weight_TK * self.factors[ids_TK])[..., None]).sum(1)


def by_hand(world: World, _payload: Any) -> float:
    """The largest difference between the layer by hand and the same sum in one process."""
    generator = torch.Generator().manual_seed(world.rank)
    x = torch.randn(7, 5, generator=generator)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(7)])
    weight = torch.rand(7, 2, generator=generator)
    factors = [1.0, 10.0, 100.0, 1000.0]
    found = two_all_to_alls(Scaling(factors[2 * world.rank :][:2]), 4, x, ids, weight)
    dist.barrier()
    return float((found - Scaling(factors)(x, ids, weight)).abs().max())


def test_the_layer_by_hand_is_the_weighted_sum_of_experts() -> None:
    found = known(run_world(2, by_hand))
    assert max(found) < 1e-3


def test_kinds_choose_their_experts_in_every_layer_and_predict_what_follows() -> None:
    ids = np.random.default_rng(0).integers(4, size=(300, 3, 2))
    model = EmulatedModel(ids, Sizes(num_experts=4, hidden_size=32, start_s=0.0, pair_s=0.0, attention_s=0.0))
    asked: list[Tensor] = []
    for layer in range(3):
        model.get_submodule(f"layers.{layer}.moe.experts").register_forward_pre_hook(
            lambda _module, args: asked.append(args[1])
        )
    tokens = torch.tensor([[0, 299, 255], [256, 7, 131]])
    logits = model(tokens)
    assert torch.equal(torch.stack(asked), torch.as_tensor(ids[tokens.flatten()]).transpose(0, 1))
    assert torch.equal(logits.argmax(-1), (tokens + STRIDE) % 300)
    logits.sum().backward()
    assert model.embed.shift.grad is not None


def test_what_oversleeps_is_taken_off_the_next_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds + 1e-4))
    waiter = Waiter()
    for _ in range(200):
        waiter.wait(5e-4)
    assert now[0] == pytest.approx(0.1, abs=2e-4)  # 0.12 were nothing taken off
