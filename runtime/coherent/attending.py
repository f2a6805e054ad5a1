"""Attention of whole samples, each seeing itself: those of one length at once, some queries at a time.

Legend: C samples; T tokens, by sample, then position; b samples of one length S; M hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.protocols import Attention

__all__ = ["attended", "seen"]

QUERY_CHUNK = 1024  # queries that attend at once: bounds a mask to this many rows


def attended(
    attention: Attention,
    x_TM: Tensor,
    position_T: Tensor,
    lengths: Sequence[int],
    seeds: Sequence[int] = (),
) -> Tensor:
    """Attention's output for normed tokens, `[T, M]`.

    Parameters
    ----------
    lengths
        Of the samples, `[C]`.
    seeds
        Of what each of them draws, `[C]`; they attend one by one then. None of them: nothing is drawn.
    """
    at_least_one = list(lengths) or [0]  # every rank uses every weight, so that each has a gradient
    columns = (torch.split(part, at_least_one) for part in attention.project(x_TM, position_T))
    by_sample = list(zip(*columns, strict=True))
    if seeds:
        return torch.cat([_drawn(attention, parts, seed) for parts, seed in zip(by_sample, seeds, strict=True)])
    y = [x_TM] * len(by_sample)
    for length in set(at_least_one):
        alike = [place for place, one in enumerate(at_least_one) if one == length]
        stacked = (torch.stack(part) for part in zip(*(by_sample[place] for place in alike), strict=True))
        for place, y_SM in zip(alike, _causal(attention, *stacked), strict=True):
            y[place] = y_SM
    return torch.cat(y)


def seen(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Whether queries at these positions `[..., Tq]` see keys at those `[..., Tk]`, bool `[..., Tq, Tk]`."""
    back = query[..., None] - key[..., None, :]
    return back >= 0 if window is None else (back >= 0) & (back < window)


def _causal(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`[b, S, M]` of queries, keys and values `[b, S, heads, d]`."""
    position_S = torch.arange(q.shape[1], device=q.device)
    y, end = [], 0
    for rows in torch.split(position_S, QUERY_CHUNK):
        end += len(rows)
        mask = seen(rows, position_S[:end], attention.window)
        y.append(attention.attend(q[:, end - len(rows) : end], k[:, :end], v[:, :end], mask))
    return torch.cat(y, dim=1)


def _drawn(attention: Attention, parts: Sequence[Tensor], seed: int) -> Tensor:
    """`[S, M]` of one sample, which draws by this seed; the generators of torch stay as they were."""
    with torch.random.fork_rng([parts[0].device] if parts[0].is_cuda else []):
        torch.manual_seed(seed)
        return _causal(attention, *(part[None] for part in parts))[0]
