"""What rows of replicas cost the busiest device: sums to owners and weights from them, beside all holders to all."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moeplan.profilers.cluster import Cluster
from moeplan.runtime.engine.layer_placement import LayerPlacement
from moeplan.solvers import eplb
from moeplan.solvers.placement import Placement

WIDTH = 1200  # elements of a row; parts of up to 16 replicas differ by one at most
Rank = Callable[[int], None]


@pytest.fixture
def be_rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    """Take the place of one rank of 16 after another."""

    def be(rank: int) -> None:
        monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: 16)

    return be


def rows_sent(placement: Placement, layer: int, be_rank: Rank) -> np.ndarray:
    """Rows that each device sends in an optimizer step, `[D]`: gradients, and weights, which go the same ways back."""
    sent = np.zeros(16)
    for rank in range(16):
        be_rank(rank)
        rows = LayerPlacement.of(placement, layer, devices_per_node=16, group=None).rows
        assert rows is not None
        cut = rows._cut(WIDTH)
        assert cut.scatter.sent[0][rank] == cut.exchange.sent[0][rank] == 0
        for route in (cut.scatter, cut.exchange):
            sent[rank] += (sum(route.sent[0]) + sum(route.received[0])) / WIDTH
    return sent


@pytest.mark.parametrize(("slots", "at_most"), [(4, 0.25), (8, 0.18)])
def test_the_busiest_device_sends_a_part_of_what_all_holders_sent_to_all(
    slots: int, at_most: float, be_rank: Rank, real_data: Path
) -> None:
    path = real_data / "smartmoe-gpt-moe-training" / "counts.npz"
    if not path.is_file():
        pytest.skip(f"real counts absent: {path}")
    counts = np.load(path)["counts"]  # record, rank, layer, part, E
    before, now = list[float](), list[float]()
    for record in range(50, 500, 150):
        loads_LE = counts[record].astype(np.int64).sum(axis=(0, 2))
        placement = eplb.solve(loads_LE, Cluster(1, 16), slots=slots, method="published").placement
        for layer in range(placement.num_layers):
            held_ED = placement.holds(layer)
            before.append((held_ED * (held_ED.sum(axis=1, keepdims=True) - 1)).sum(axis=0).max())
            now.append(rows_sent(placement, layer, be_rank).max())
    print(f"{slots} slots: {np.mean(before):.1f} rows a backward pass, {np.mean(now):.1f} an optimizer step")
    assert np.mean(now) <= at_most * np.mean(before)


def test_no_slot_sends_more_than_a_row_each_way(be_rank: Rank) -> None:
    everywhere = Placement.from_sets([[[*range(8)]] * 16], 8)
    sent = rows_sent(everywhere, 0, be_rank)
    assert sent.max() <= 2 * 8
    assert sent.sum() == pytest.approx(2 * 8 * 15)  # no replica more than one row each way


def test_parts_of_a_row_are_as_equal_as_can_be_and_make_it_up(be_rank: Rank) -> None:
    be_rank(0)
    rows = LayerPlacement.of(Placement.from_sets([[[0, 1]] * 16], 2), 0, devices_per_node=16, group=None).rows
    assert rows is not None
    cut = rows._cut(100)
    assert (len(cut.owned), sum(cut.owned)) == (15, 100)
    assert set(cut.owned) == {6, 7}
    assert torch.tensor(cut.kept).sum() == 100
