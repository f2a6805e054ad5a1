"""Exchanges: collectives that move blocks of bytes between ranks as they are.

Legend: P ranks; n bytes of a buffer; t seconds; `[P, P]` from a sender (row) to a receiver (column).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..exchanged import Exchange
from ..measurement import Size
from ..world import World
from .case import Collective, buffer_sizes
from .pattern import NOWHERE, of_sender, unlike

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

SEED = 0
SIGMAS_PERCENT = (50, 100)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Buffers that a rank sends and receives, uint8, a block to and from each rank of the group."""

    send: "Tensor"
    received: "Tensor"
    group: "ProcessGroup | None"
    #: into, out: bytes of the block from, and to, each rank; None where all are equal
    into: list[int] | None = None
    out: list[int] | None = None
    devices_per_node: int = 1  #: Of a gather


class AllToAll(Collective):
    """`all_to_all_single` with equal blocks; the work is the bytes that leave a rank for others.

    Notes
    -----
    As in nccl-tests: a rank keeps one of its P blocks and sends P-1 through its port, hence

        algbw = n / t,        busbw = algbw (P-1) / P = work / t

    busbw compares with the hardware's figure for one direction of a port, whatever P is.
    """

    name = "all_to_all"

    def prepare(self, size: Size, dtype: str, world: World) -> Blocks:
        """Blocks that tell sender, receiver and position; the receiving buffer holds a value none of them has."""
        send = _to_peers([size["bytes"] // world.size] * world.size, world)
        return Blocks(send, send.new_full(send.shape, NOWHERE), world.group)

    def run(self, inputs: Blocks) -> "Tensor":
        """The exchange."""
        import torch.distributed as dist

        dist.all_to_all_single(inputs.received, inputs.send, inputs.into, inputs.out, group=inputs.group)
        return inputs.received

    def check(self, inputs: Blocks, output: "Tensor", world: World) -> str | None:
        """Every block is the one its sender made for this rank."""
        import torch

        return _first_unlike(torch.split(output, inputs.into or len(output) // world.size), world.rank)


class UnevenAllToAll(AllToAll):
    """The all-to-all as routing makes it, blocks of log-normal sizes; the work is the bytes through the busiest port.

    Notes
    -----
    With s_ij the bytes from rank i to rank j, the exchange ends no sooner than its busiest port, in or out, hence

        work = max over i of max(sum over j != i of s_ij, sum over j != i of s_ji),        busbw = work / t
    """

    name = "uneven_all_to_all"

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

    def prepare(self, size: Size, dtype: str, world: World) -> Blocks:
        """Blocks that tell sender, receiver and position; the receiving buffer holds a value none of them has."""
        splits = splits_PP(size, world.size)
        out, into = splits[world.rank].tolist(), splits[:, world.rank].tolist()
        send = _to_peers(out, world)
        return Blocks(send, send.new_full((sum(into),), NOWHERE), world.group, into, out)


class AllGather(Collective):
    """The runtime's gather of K and V into one buffer of n bytes; the work is the bytes that reach a rank from others.

    Notes
    -----
    P-1 of the P blocks come in through a rank's port, hence

        algbw = n / t,        busbw = algbw (P-1) / P = work / t
    """

    name = "all_gather"

    def prepare(self, size: Size, dtype: str, world: World) -> Blocks:
        """A block that tells its sender and position; the receiving buffer holds a value no block has."""
        block = of_sender(world.rank, 0, size["bytes"] // world.size, world.device)
        received = block.new_full((len(block) * world.size,), NOWHERE)
        return Blocks(block, received, world.group, devices_per_node=world.devices_per_node)

    def run(self, inputs: Blocks) -> "Tensor":
        """The gathering."""
        import torch.distributed as dist

        if inputs.send.device.type == "cpu":
            counts = [len(inputs.send)] * (len(inputs.received) // len(inputs.send))
            Exchange.gather(inputs.received, inputs.send, counts, inputs.devices_per_node, inputs.group).wait()
            return inputs.received
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
        gather(inputs.received, inputs.send, group=inputs.group)
        return inputs.received

    def check(self, inputs: Blocks, output: "Tensor", world: World) -> str | None:
        """Every block is its sender's."""
        return _first_unlike(output.view(world.size, -1), 0)


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


def _to_peers(lengths: Sequence[int], world: World) -> "Tensor":
    """The blocks of these lengths that this rank sends, one after another."""
    import torch

    return torch.cat([of_sender(world.rank, peer, length, world.device) for peer, length in enumerate(lengths)])


def _first_unlike(blocks: "Iterable[Tensor]", receiver: int) -> str | None:
    """The first error among blocks by sender; None where all are right."""
    errors = (unlike(block, sender, receiver) for sender, block in enumerate(blocks))
    return next(filter(None, errors), None)
