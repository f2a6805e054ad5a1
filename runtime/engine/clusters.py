"""Clusters of copies: rows for one device and the same experts, so near to one another that one stands for all.

Legend: T tokens; n copies; K experts per token; M hidden size; B blocks; w rows of the widest block of a batch; g
groups of copies that ask one device for the same experts.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...solvers.arrays import Ints
from .copies import Copies

BLOCK = 1024  # most rows that are compared with one another: cost is linear in tokens beyond
NARROWEST = 0.8  # of the widest block of a batch, whose rows the others are padded to
NARROWEST_CUDA = 0.3  # to start a batch takes longer there than padding
STRIP = 128  # rows at least, of a block
MOST_PAIRS = 2**20  # of a batch; 64 times as many on a GPU

# The row that stands for each, [B, w], by how much more each could be apart from each and still serve it [B, w, w]:
# negative where it does not serve it.
Cover = Callable[[Tensor], Tensor]


@torch.no_grad()
def clusters(copies: Copies, x_TM: Tensor, share_nK: Tensor, reach_n: Tensor, cover: Cover) -> Tensor:
    """The copy that stands for each copy, int64 `[n]`, its own number where it travels.

    Row j may stand for row i if their distance is within i's reach,

        d_ij = sqrt(2 - 2 u_i u_j) + |share_i - share_j|_1 / 2 <= reach_i,   u = x / |x|                           (1)

    where both ask one device for the same experts. At most `BLOCK` such rows are compared with one another.

    Parameters
    ----------
    copies
        In one piece.
    share_nK
        Each asked expert's part of a copy's gate weight, by ascending expert, 0 for those that are not asked.
    reach_n
        0 for copies that travel as they are.
    """
    with torch.autocast(x_TM.device.type, enabled=False):
        stands_n = torch.arange(len(copies.row), device=x_TM.device)
        u_TM = functional.normalize(x_TM.float(), dim=1)
        for place_Bw, real_Bw in _batches(*grouped(copies, reach_n)):
            u_BwM = u_TM.index_select(0, copies.row[place_Bw].flatten()).view(*place_Bw.shape, -1)
            room_Bww = torch.rsub(products(u_BwM), 2, alpha=2).clamp_(min=0).sqrt_().neg_()  # reach - d: (1)
            share_BwK = share_nK[place_Bw].float()
            if share_BwK.is_cuda or (share_BwK != share_BwK[:, :1]).any():  # most copies ask one expert, share 1
                room_Bww.sub_(_apart(share_BwK), alpha=0.5)
            room_Bww.add_(reach_n[place_Bw].float().where(real_Bw, -torch.inf)[:, None, :])
            if room_Bww.is_cuda:
                room_Bww.masked_fill_(~real_Bw[:, :, None], -torch.inf)
            else:
                room_Bww[~real_Bw] = -torch.inf
            stands_n[place_Bw[real_Bw]] = place_Bw.gather(1, cover(room_Bww))[real_Bw]
    return stands_n


def grouped(copies: Copies, reach_n: Tensor) -> tuple[Tensor, Tensor]:
    """Copies that may be condensed, by group, then number, int64, and the sizes of groups, int64 `[g]`."""
    free_n = (reach_n > 0).nonzero().flatten()
    key_n, most = copies.place[free_n], copies.counts.numel()
    ids_nK = copies.beside[free_n].sort(dim=1).values.long()
    span = int(ids_nK.max()) + 2 if len(ids_nK) else 1
    for ids_n in ids_nK.T:
        if most * span > 2**62:
            key_n, most = torch.unique(key_n, return_inverse=True)[1], len(key_n)
        key_n, most = key_n * span + ids_n + 1, most * span
    group_n, size_g = torch.unique(key_n, return_inverse=True, return_counts=True)[1:]
    return free_n[group_n.argsort(stable=True)], size_g


def compared(size_g: Ints) -> Ints:
    """Pairs of rows of each group that are compared, a row and itself too, int64 `[g]`."""
    blocks_g = -(-size_g // BLOCK)
    least_g, more_g = np.divmod(size_g, np.maximum(blocks_g, 1))
    return np.asarray((blocks_g - more_g) * least_g**2 + more_g * (least_g + 1) ** 2)


def products(u_BwM: Tensor) -> Tensor:
    """u_i u_j `[B, w, w]`; of wide blocks on a CPU each pair of strips once, which spares up to 7 of 16 products."""
    width = u_BwM.shape[1]
    if u_BwM.is_cuda or width < 2 * STRIP:
        return u_BwM @ u_BwM.mT
    products_Bww, strip = u_BwM.new_empty(len(u_BwM), width, width), -(-width // (width // STRIP))
    for start in range(0, width, strip):
        end = start + strip
        products_Bww[:, start:end, start:] = u_BwM[:, start:end] @ u_BwM[:, start:].mT
        products_Bww[:, end:, start:end] = products_Bww[:, start:end, end:].mT
    return products_Bww


def _apart(share_BwK: Tensor) -> Tensor:
    """|share_i - share_j|_1 `[B, w, w]`; some times faster on a GPU than its own, which takes a thread block a pair."""
    if not share_BwK.is_cuda:
        return torch.cdist(share_BwK, share_BwK, p=1)
    apart_Bww = share_BwK.new_zeros(1)
    for share_Bw in share_BwK.unbind(2):
        apart_Bww = (share_Bw[:, :, None] - share_Bw[:, None]).abs_().add_(apart_Bww)
    return apart_Bww


def _batches(order_n: Tensor, group_sizes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of about equal size side by side: their copies, int64 `[B, w]`, and where these are no padding."""
    size_g = group_sizes.cpu().numpy()
    count_g = -(-size_g // BLOCK)
    number_B = np.arange(count_g.sum()) - np.repeat(count_g.cumsum() - count_g, count_g)
    size_B, count_B = (np.repeat(of_g, count_g) for of_g in (size_g, count_g))
    end_B = (number_B + 1) * size_B // count_B
    first_B = number_B * size_B // count_B
    size_B, first_B = end_B - first_B, first_B + np.repeat(size_g.cumsum() - size_g, count_g)
    widest_first = np.argsort(-size_B, kind="stable")
    widest_first = widest_first[: np.count_nonzero(size_B > 1)]
    size_B = size_B[widest_first]
    device, end = order_n.device, 0
    first_B1, size_B1 = torch.from_numpy(np.stack([first_B[widest_first], size_B])[..., None]).to(device)
    most, narrowest = (MOST_PAIRS, NARROWEST) if device.type == "cpu" else (64 * MOST_PAIRS, NARROWEST_CUDA)
    while end < len(size_B):
        start, width = end, int(size_B[end])
        near = int(np.count_nonzero(size_B[start:] >= narrowest * width))
        end += min(near, max(1, most // width**2))
        place_w = torch.arange(width, device=device)
        yield (
            order_n[(first_B1[start:end] + place_w).clamp(max=len(order_n) - 1)],
            place_w < size_B1[start:end],
        )


def sequential(serves_Bww: Tensor) -> Tensor:
    """The priority cover, one row after another."""
    from ...solvers.cover import priority_cover

    return torch.from_numpy(priority_cover(serves_Bww.numpy()))


def rounds(serves_Bww: Tensor) -> Tensor:
    """The priority cover, to the bit, in rounds that treat all rows at once.

    A row is kept once no earlier row that serves it is undecided or kept. It is covered once one is kept.
    """
    order_Bw = serves_Bww.sum(2).argsort(dim=1, descending=True, stable=True)
    blocks_B11 = torch.arange(len(serves_Bww), device=serves_Bww.device)[:, None, None]
    earlier_Bww = serves_Bww[blocks_B11, order_Bw[:, :, None], order_Bw[:, None, :]].triu(1)
    undecided_Bw = torch.ones_like(order_Bw, dtype=torch.bool)
    kept_Bw = torch.zeros_like(undecided_Bw)
    while undecided_Bw.any():
        kept_Bw |= undecided_Bw & ~(earlier_Bww & undecided_Bw[:, :, None]).any(1)
        undecided_Bw &= ~(kept_Bw | (earlier_Bww & kept_Bw[:, :, None]).any(1))
    by_Bww = (earlier_Bww | torch.eye(kept_Bw.shape[1], dtype=torch.bool, device=kept_Bw.device)) & kept_Bw[:, :, None]
    first_Bw = order_Bw.gather(1, by_Bww.to(torch.uint8).argmax(1))
    return torch.empty_like(first_Bw).scatter_(1, order_Bw, first_Bw)


def nearest(room_Bww: Tensor, first_Bw: Tensor) -> Tensor:
    """Nearest kept row that serves each row; kept rows serve themselves.

    A room of NaN, as an infinite row has, serves nobody.
    """
    kept_Bw = first_Bw == torch.arange(first_Bw.shape[1], device=first_Bw.device)
    if room_Bww.is_cuda:
        serves_Bww = kept_Bw[:, :, None] & (room_Bww >= 0)
        nearest_Bw = room_Bww.masked_fill(~serves_Bww, -torch.inf).argmax(1)
    else:  # kept rows are few
        kept = [kept_w.nonzero().flatten() for kept_w in kept_Bw]
        rooms = (room_ww[row].nan_to_num(nan=-torch.inf) for room_ww, row in zip(room_Bww, kept, strict=True))
        nearest_Bw = torch.stack([row[room_rw.argmax(0)] for room_rw, row in zip(rooms, kept, strict=True)])
    return first_Bw.where(kept_Bw, nearest_Bw)


def priority(room_Bww: Tensor) -> Tensor:
    """The priority cover, found as is fastest where the rows are, each row with the nearest that is kept."""
    cover = sequential if room_Bww.device.type == "cpu" else rounds
    return nearest(room_Bww, cover(room_Bww >= 0))


def star(room_Bww: Tensor) -> Tensor:
    """The paper's cover, one row after another; hundreds of dependent steps, on the host."""
    from ...solvers.cover import star_cover

    return torch.from_numpy(star_cover((room_Bww >= 0).cpu().numpy())).to(room_Bww.device)
