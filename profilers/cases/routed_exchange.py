"""The exchanges of a routed block as `runtime` makes them: a dispatch of token copies and the combine of their results.

Legend: D ranks; T tokens of a rank; n copies that a rank sends; m that it receives; K experts per token; M hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..exchanged import Exchange
from ..measurement import Size
from ..stopwatch import lap
from ..world import World
from .case import Collective
from .routing import popularity_DE

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

HIDDEN, TOP_K, EXPERTS = 128, 2, 4  # elements of a float32 row; of a token; of a rank, whose popularities add up
ROW_BYTES = 4 * HIDDEN
QUICK_CPU_OCTAVES, CPU_OCTAVES, CUDA_OCTAVES = (0, 7, 11, 14), (0, 4, 8, 11, 13, 16), range(0, 21, 2)
COPIES = 2  # of a token
PRIME = 8191  # neighbouring ranks and tokens never look alike, and float32 holds the numbers exactly


@dataclass(frozen=True, slots=True)
class Trip:
    """Tokens of a rank, the copies that it sends, in the order of their receivers, and what it sends back."""

    copies: NDArray[np.int64]  #: From each rank to each, `[D, D]`
    x: "Tensor"  #: `[T, M]`
    weight: "Tensor"  #: `[T, K]`
    ids: "Tensor"  #: int32 `[T, K]`
    row: "Tensor"  #: The token of each copy, int64 `[n]`
    counts: "Tensor"  #: Copies by receiver, int64 `[D]`
    result: "Tensor"  #: The partial sums that this rank sends back, all its rank plus 1, `[m, M]`
    order: "Tensor | None"  #: Their order by receiver, where tokens move on, int64 `[m]`; None where they return
    group: "ProcessGroup | None"


class RoutedExchange(Collective):
    """Counts, gather of rows, uneven all-to-all; an all-to-all back and the sum by token; the work is both ways' bytes.

    Where tokens move on instead of returning (`moves` 1), both ends of each way are told how many partial sums go it,
    these are gathered once more before they are sent, and the number of its token goes with each.

    Notes
    -----
    Ranks send to each other in proportion to the popularities of `routing`, or all as much (`even` 1), and each keeps
    `kept` percent of what it sends or receives. Even exchanges take longer though the busiest rank sends no more: all
    ports are as busy at once. Copying that costs a CPU as much as sending it. Of `bytes` that the busiest rank sends or
    receives, ids and gate weights beside hidden vectors not counted, the rest goes through its port:

        work = 2 bytes (1 - kept / 100),        busbw = work / t                                                (1)
    """

    name = "routed_exchange"
    curve = "bytes"

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """Bytes of hidden vectors that the busiest rank sends or receives; `ways` go together with each."""
        octaves: Sequence[int] = CUDA_OCTAVES if world.device != "cpu" else QUICK_CPU_OCTAVES if quick else CPU_OCTAVES
        return [{"bytes": 1024 << octave, **way} for octave in octaves for way in ways(world.size)]

    def work(self, size: Size, num_ranks: int) -> int:
        """Bytes of a dispatch and a combine through the busiest port, (1)."""
        return 2 * size["bytes"] * (100 - size["kept"]) // 100

    def prepare(self, size: Size, dtype: str, world: World) -> Trip:
        """Tokens that tell rank and number; which copies go where is seeded by the rank."""
        import torch

        count_DD = copies_DD(size["bytes"], size["kept"], world.size, even=bool(size["even"]))
        count_D = count_DD[world.rank]
        tokens, received, on = _num_tokens(count_D), int(count_DD[:, world.rank].sum()), world.device
        return Trip(
            count_DD,
            _told(torch.arange(tokens), world.rank).to(on)[:, None].repeat(1, HIDDEN),
            torch.ones(tokens, TOP_K, device=on),
            torch.zeros(tokens, TOP_K, device=on, dtype=torch.int32),
            torch.cat(_drawn(count_D, world.rank)).to(on),
            torch.from_numpy(count_D).to(on),
            torch.full((received, HIDDEN), world.rank + 1.0, device=on),
            torch.randperm(received, generator=torch.Generator().manual_seed(world.rank)).to(on)
            if size["moves"]
            else None,
            world.group,
        )

    def run(self, inputs: Trip) -> tuple["Tensor", "Tensor"]:
        """The hidden vectors that arrive, `[m, M]`, and the sum of the results by token, `[T, M]`."""
        import torch
        import torch.distributed as dist

        # Laps end where the runtime's do (`trip.py`, `migrating.py`): each begins with a barrier.
        with lap("dispatch"):
            heard_D = torch.empty_like(inputs.counts)
            dist.all_to_all_single(heard_D, inputs.counts, group=inputs.group)
            sent, received = inputs.counts.tolist(), heard_D.tolist()
        with lap("dispatch"):
            columns = inputs.x[inputs.row], inputs.weight[inputs.row], inputs.ids[inputs.row]
            rows = torch.cat([column.view(torch.uint8) for column in columns], dim=1)
            arrived = rows.new_empty(sum(received), rows.shape[1])
            Exchange.start(arrived, rows, received, sent, inputs.group).wait()
            x_mM = arrived[:, :ROW_BYTES].view(torch.float32)
        results = inputs.result
        if inputs.order is not None:
            with lap("combine"):
                next_D2D = inputs.counts.repeat(len(sent), 2, 1)  # sums that go on, of all ranks, told to both ends
                heard_D2D = torch.empty_like(next_D2D)
                dist.all_to_all_single(heard_D2D, next_D2D, group=inputs.group)
                heard_D2D.sum(0).tolist()
            with lap("combine"):
                tag_m1 = inputs.order.int()[:, None]
                results = torch.cat([column.view(torch.uint8) for column in (results[inputs.order], tag_m1)], dim=1)
        with lap("combine"):
            back = results.new_empty(sum(sent), results.shape[1])
            Exchange.start(back, results, sent, received, inputs.group).wait()
            back_nM = back if inputs.order is None else back[:, :ROW_BYTES].view(torch.float32).contiguous()
        with lap("combine"):
            return x_mM, torch.zeros_like(inputs.x).index_add_(0, inputs.row, back_nM)

    def check(self, inputs: Trip, output: tuple["Tensor", "Tensor"], world: World) -> str | None:
        """Rows that arrive are those that their sender drew; each token has the sum over its receivers."""
        import torch

        x_mM, total_TM = output
        for sender, block in enumerate(torch.split(x_mM, inputs.copies[:, world.rank].tolist())):
            expected = _told(_drawn(inputs.copies[sender], sender)[world.rank], sender).to(block.device)
            if wrong := int((block != expected[:, None]).any(dim=1).sum()):
                return f"{wrong} of {len(block)} rows from rank {sender} differ"
        receiver_n = torch.arange(world.size, device=x_mM.device).repeat_interleave(inputs.counts)
        expected_T = inputs.x.new_zeros(len(inputs.x)).index_add_(0, inputs.row, (receiver_n + 1).float())
        wrong = int((total_TM != expected_T[:, None]).any(dim=1).sum())
        return f"{wrong} of {len(total_TM)} sums differ" if wrong else None


def ways(num_ranks: int) -> Sequence[Size]:
    """Tokens that return or move on, and percent that ranks keep: of even copies, or half of the others more.

    Of tokens that return also even exchanges.
    """
    even = 100 // num_ranks
    kinds = [{"moves": moves, "kept": kept, "even": 0} for kept in ((100 + even) // 2, even) for moves in (0, 1)]
    return [*kinds, {"moves": 0, "kept": even, "even": 1}]


def node_shares(num_ranks: int, num_nodes: int) -> tuple[float, float]:
    """Mean bytes between nodes of a rank of the busiest node, and of any, over the busiest rank's to all others.

    Notes
    -----
    With p_n the popularity of a node's ranks, G of them, each of which sends n p_d to d, of copies as (1) of
    `copies_DD` has them

        max over n of max((D / G - 1) p_n, 1 - p_n) / max over d of q_d,    (1 - G / D) / max over d of q_d
    """
    share_D = popularity_DE(num_ranks, EXPERTS).sum(axis=1)
    share_N = share_D.reshape(num_nodes, -1).sum(axis=1)
    node_N = np.maximum((num_nodes - 1) * share_N, 1 - share_N)
    port = np.maximum((num_ranks - 1) * share_D, 1 - share_D).max()
    return float(node_N.max() / port), float((1 - 1 / num_nodes) / port)


def copies_DD(  # noqa: N802  the shape
    num_bytes: int, kept: int, num_ranks: int, *, even: bool = False
) -> NDArray[np.int64]:
    """Copies from every rank to each, `[D, D]`, so that the busiest handles `num_bytes`, at least one row each.

    Notes
    -----
    With p_d the popularity of a rank's experts, n p_d copies go from each other rank to d, whose port passes n q_d in
    its busier direction, and it keeps a share k of all that it handles:

        q_d = max((D - 1) p_d, 1 - p_d),    n = bytes (1 - k) / max over d of q_d,    n_dd = n q_d k / (1 - k)     (1)
    """
    share_D = np.full(num_ranks, 1 / num_ranks) if even else popularity_DE(num_ranks, EXPERTS).sum(axis=1)
    port_D = np.maximum((num_ranks - 1) * share_D, 1 - share_D)
    sent_DD = np.tile(share_D, (num_ranks, 1))
    np.fill_diagonal(sent_DD, port_D * kept / (100 - kept))
    sent_DD *= num_bytes / ROW_BYTES * (1 - kept / 100) / port_D.max()
    return np.asarray(np.maximum(np.rint(sent_DD), 1), np.int64)  # (1)


def _num_tokens(count_D: NDArray[np.int64]) -> int:
    return -(-int(count_D.sum()) // COPIES)


def _drawn(count_D: NDArray[np.int64], rank: int) -> "list[Tensor]":
    """The tokens of a rank whose copies go to each, ascending, drawn by its number."""
    import torch

    generator, tokens = torch.Generator().manual_seed(rank), _num_tokens(count_D)
    return [torch.randint(tokens, (count,), generator=generator).sort().values for count in count_D.tolist()]


def _told(token: "Tensor", rank: int) -> "Tensor":
    """A number that tells rank and token."""
    return (token % PRIME + rank).float()
