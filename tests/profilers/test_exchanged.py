"""Exchanges of rows on real ranks: what arrives, from whom, in which order, beside messages of others."""

import subprocess
import sys
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from moeplan.profilers.exchanged import Exchange
from moeplan.profilers.world import World
from tests.runtime.worlds import by_rank

RANKS, DRAWS = 3, 6
TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def splits(draw: int, size: int) -> np.ndarray:
    """Rows from each rank to each, some none, in the last draw none at all."""
    return np.random.default_rng(draw).integers(0, 4, (size, size)) * (draw < DRAWS - 1)


def block(draw: int, sender: int, receiver: int, dtype: torch.dtype) -> torch.Tensor:
    """What goes from one rank to another, known to both."""
    rng = np.random.default_rng((draw, sender, receiver))
    return torch.from_numpy(rng.integers(0, 100, (splits(draw, RANKS)[sender, receiver], 2))).to(dtype)


def exchanges(world: World, _payload: None) -> list[str]:
    """What is wrong, by name."""
    rank, wrong, started = world.rank, list[str](), list[tuple[str, Exchange, Any, Any]]()
    mine, theirs = (rank + 1) % RANKS, (rank - 1) % RANKS
    of_user = torch.full((2,), rank), torch.zeros(2, dtype=torch.int64)  # on the way before, with torch's own tag
    sending = dist.isend(of_user[0], mine)
    given_up = torch.full((RANKS, 2), -1.0)
    Exchange.start(torch.zeros_like(given_up), given_up, [1] * RANKS, [1] * RANKS)  # nobody waits for it
    for draw in range(DRAWS):
        for dtype in TYPES:
            sent = torch.cat([block(draw, rank, other, dtype) for other in range(RANKS)])
            expected = torch.cat([block(draw, other, rank, dtype) for other in range(RANKS)])
            rows = splits(draw, RANKS)
            received = torch.zeros_like(expected)
            under_way = Exchange.start(received, sent, rows[:, rank].tolist(), rows[rank].tolist())
            started.append((f"{draw} {dtype}", under_way, received, expected))
    for name, under_way, received, expected in started[::-1]:  # all are under way at once
        under_way.wait()
        wrong += [] if torch.equal(received, expected) else [name]
    dist.recv(of_user[1], theirs)
    assert sending is not None
    sending.wait()
    wrong += [] if of_user[1].tolist() == [theirs] * 2 else ["a message of the user's"]
    pair = dist.new_group([0, 2])
    if rank != 1:
        even = torch.zeros(2, 3, requires_grad=True)
        with torch.no_grad():
            even.fill_(rank)
        arrived = torch.full((2, 3), -1.0)
        Exchange.start(arrived, even, [1, 1], [1, 1], pair).wait()
        wrong += [] if arrived[:, 0].tolist() == [0, 2] and not arrived.requires_grad else ["a group"]
        with torch.inference_mode():
            gathered = torch.full((3, 3), -1.0)
        Exchange.gather(gathered, torch.full((1 + rank // 2, 3), rank), [1, 2], 1, pair).wait()
        wrong += [] if gathered[:, 0].tolist() == [0, 2, 2] else ["a gather of a group"]
    return wrong


def order(world: World, _payload: None) -> list[str]:
    """In which order a rank posts what it receives and what it sends."""
    posted, ones = list[str](), [1] * world.size

    def noted(name: str, call: Any) -> Any:
        def posting(*given: Any, **more: Any) -> Any:
            posted.append(name)
            return call(*given, **more)

        return posting

    with mock.patch.multiple(dist, irecv=noted("receive", dist.irecv), isend=noted("send", dist.isend)):
        Exchange.start(torch.zeros(world.size, 1), torch.ones(world.size, 1), ones, ones).wait()
        Exchange.gather(torch.zeros(world.size, 1), torch.ones(1, 1), ones, 1).wait()
    return posted


def gathers(world: World, _payload: None) -> list[str]:
    """What is wrong, by nodes and draw, where ranks have different numbers of rows."""
    rank, wrong = world.rank, list[str]()
    for devices_per_node in (1, 2, 3, 6):
        with mock.patch.object(dist, "isend", wraps=dist.isend) as sends:
            started, left, stayed = list[tuple[int, Exchange, Any, Any]](), 0, 0
            for draw in range(DRAWS):
                counts = splits(draw, world.size)[0].tolist()
                expected = torch.cat([torch.full((count, 3), one) for one, count in enumerate(counts)])
                arrived, rows = torch.full_like(expected, -1), torch.full((counts[rank], 3), rank)
                started.append((draw, Exchange.gather(arrived, rows, counts, devices_per_node), arrived, expected))
                of_place = sum(counts[rank % devices_per_node :: devices_per_node])
                left += of_place - counts[(rank + devices_per_node) % world.size]  # all but what the next has itself
                stayed += of_place * (devices_per_node - 1)
            for draw, under_way, arrived, expected in started[::-1]:  # all are under way at once
                under_way.wait()
                wrong += [] if torch.equal(arrived, expected) else [f"{devices_per_node} a node, {draw}"]
        rows_to = [(call.kwargs["group_dst"] // devices_per_node, len(call.args[0])) for call in sends.call_args_list]
        apart = sum(count for node, count in rows_to if node != rank // devices_per_node)
        if (apart, sum(count for _, count in rows_to)) != (left, left + stayed):
            wrong.append(f"{devices_per_node} a node: {rows_to}")
    return wrong


def test_gathered_rows_reach_each_node_once_and_every_rank_in_order() -> None:
    assert by_rank(6, gathers) == [[]] * 6


def test_rows_arrive_in_the_order_of_ranks_whatever_else_is_on_its_way() -> None:
    assert by_rank(RANKS, exchanges) == [[]] * RANKS


def test_all_receives_are_posted_before_anything_is_sent() -> None:
    assert by_rank(RANKS, order) == [(["receive"] * 2 + ["send"] * 2) * 2] * RANKS


def test_a_script_may_end_while_rows_are_on_their_way() -> None:
    script = """if True:
        import torch, torch.distributed as dist
        from moeplan.profilers.exchanged import Exchange
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        rows = torch.ones(1 << 21, 64)  # for a few tenths of a second
        Exchange.start(torch.empty_like(rows), rows, [len(rows)], [len(rows)])
    """
    ended = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
