"""The all-to-all as routing makes it: blocks of log-normal sizes.

Legend: P ranks; `[P, P]` from a sender (row) to a receiver (column).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..measurement import Size
from ..world import World
from .grid import buffer_sizes
from .pattern import NOWHERE, of_sender, unlike

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["UnevenAllToAll", "splits_PP"]

SEED = 0
SIGMAS_PERCENT = (50, 100)


@dataclass(frozen=True, slots=True)
class UnevenBlocks:
    """Buffers that a rank sends and receives, uint8, with the bytes of the block to and from each rank of the group."""

    send: "Tensor"
    send_splits: list[int]
    received: "Tensor"
    received_splits: list[int]
    group: "ProcessGroup | None"


@dataclass(frozen=True, slots=True)
class UnevenAllToAll:
    """`all_to_all_single` with uneven blocks; the work is the bytes through the busiest rank's port, in or out.

    Notes
    -----
    With s_ij the bytes from rank i to rank j, the exchange ends no sooner than its busiest port, hence

        work = max over i of max(sum over j != i of s_ij, sum over j != i of s_ji),        busbw = work / t
    """

    name: str = "uneven_all_to_all"
    unit: Literal["bytes"] = "bytes"
    min_ranks: int = 2

    def dtypes(self, device: str) -> Sequence[str]:
        """Bytes of any element."""
        return ("uint8",)

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """Mean bytes of a rank's buffer, at each skew; every other size when quick."""
        counts = buffer_sizes(world, quick=quick)[:: 2 if quick else 1]
        return [{"bytes": count, "sigma_percent": sigma} for count in counts for sigma in SIGMAS_PERCENT]

    def work(self, size: Size, num_ranks: int) -> int:
        """Bytes through the busiest port."""
        count, sigma = np.broadcast_arrays(size["bytes"], size["sigma_percent"])
        skews, skew = np.unique(sigma, return_inverse=True)
        share_UPP = _share_PP(skews, num_ranks)
        into = np.zeros((*count.shape, num_ranks), dtype=np.int64)
        busiest = np.zeros(count.shape, dtype=np.int64)
        for rank in range(num_ranks):  # rank by rank: all blocks of many sizes are gigabytes
            out = _floored(count[..., None], share_UPP[skew.reshape(count.shape), rank])
            out[..., rank] = 0
            into += out
            busiest = np.maximum(busiest, out.sum(-1))
        busiest = np.maximum(busiest, into.max(-1))
        return int(busiest) if busiest.ndim == 0 else busiest

    def prepare(self, size: Size, dtype: str, world: World) -> UnevenBlocks:
        """Blocks that tell sender, receiver and position; the receiving buffer holds a value none of them has."""
        import torch

        splits, rank = splits_PP(size, world.size), world.rank
        out, into = splits[rank].tolist(), splits[:, rank].tolist()
        send = torch.cat([of_sender(rank, peer, length, world.device) for peer, length in enumerate(out)])
        return UnevenBlocks(send, out, send.new_full((sum(into),), NOWHERE), into, world.group)

    def run(self, inputs: UnevenBlocks) -> "Tensor":
        """The exchange."""
        import torch.distributed as dist

        out, into = inputs.send_splits, inputs.received_splits
        dist.all_to_all_single(inputs.received, inputs.send, into, out, group=inputs.group)
        return inputs.received

    def check(self, inputs: UnevenBlocks, output: "Tensor", world: World) -> str | None:
        """Every block is the one its sender made for this rank."""
        import torch

        blocks = torch.split(output, inputs.received_splits)
        found = (unlike(block, peer, world.rank) for peer, block in enumerate(blocks))
        return next(filter(None, found), None)


def splits_PP(size: Size, num_ranks: int) -> NDArray[np.int64]:  # noqa: N802  the shape
    """Bytes from every rank to every rank, `[..., P, P]`, the same on all ranks; `...` is the shape of the size.

    Notes
    -----
    With z_ij standard normal, drawn once for P, and w_ij = exp(sigma z_ij), of the P n bytes of all ranks

        s_ij = floor(P n w_ij / sum of w)                                                               (1)
    """
    return _floored(np.asarray(size["bytes"])[..., None, None], _share_PP(np.asarray(size["sigma_percent"]), num_ranks))


def _share_PP(sigma_percent: NDArray[Any], num_ranks: int) -> NDArray[np.float64]:  # noqa: N802  the shape
    """The w_ij / sum of w of (1), `[..., P, P]`."""
    z_PP = np.random.default_rng(SEED).standard_normal((num_ranks, num_ranks))
    w_PP = np.exp(sigma_percent[..., None, None] / 100 * z_PP)
    return np.asarray(w_PP / w_PP.sum((-2, -1), keepdims=True))


def _floored(count: NDArray[Any], share: NDArray[np.float64]) -> NDArray[np.int64]:
    """The s_ij of (1); every row of shares is of P ranks."""
    return np.asarray(share.shape[-1] * count * share, dtype=np.int64)  # (1)
