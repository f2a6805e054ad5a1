"""Attention of whole samples: called by `runtime` where samples move, measured by the case `attended`.

Legend: T tokens, by sample, then position; b samples of one length S; C elements of a head; M hidden size.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

QUERIES = 1024  # at once: bounds a mask to this many rows
ROTARY_BASE = 10000.0


class Attention(Protocol):
    """Attention as `project`, which needs a token alone, and `attend`, which needs its context."""

    window: int | None  # how many of the last keys a query sees, its own included; None: all

    def project(self, x_TM: Tensor, position_T: Tensor, /) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[T, heads, C]`, keys and values `[T, kv heads, C]`."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, /) -> Tensor:
        """`[Tq, M]`; `mask` bool `[Tq, Tk]` is true where a query sees a key. All may have a leading batch."""
        ...


def attended(
    attention: Attention, x_TM: Tensor, position_T: Tensor, lengths: Sequence[int], seeds: Sequence[int] = ()
) -> Tensor:
    """Attention's output for normed tokens, `[T, M]`; the samples of one length attend at once.

    Parameters
    ----------
    lengths
        Of the samples.
    seeds
        Of what each of them draws; they attend one by one then. None of them: nothing is drawn.
    """
    at_least_one = list(lengths) or [0]  # every rank uses every weight, so that each has a gradient
    columns = (torch.split(part, at_least_one) for part in attention.project(x_TM, position_T))
    by_sample = list(zip(*columns, strict=True))
    if seeds:
        return torch.cat([_drawn(attention, parts, seed) for parts, seed in zip(by_sample, seeds, strict=True)])
    y = [x_TM] * len(by_sample)
    for length in set(at_least_one):
        alike = [place for place, tokens in enumerate(at_least_one) if tokens == length]
        stacked = (torch.stack(part) for part in zip(*(by_sample[place] for place in alike), strict=True))
        for place, y_SM in zip(alike, _causal(attention, *stacked), strict=True):
            y[place] = y_SM
    return torch.cat(y)


def seen(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Mask of the keys that queries at these positions `[..., Tq]` see at those `[..., Tk]`, bool `[..., Tq, Tk]`."""
    causal = query[..., None] >= key[..., None, :]
    return causal if window is None else causal & (query[..., None] - window < key[..., None, :])


def rotated(x: Tensor, position_T: Tensor) -> Tensor:
    """`x` `[..., T, heads, C]` with each pair of elements turned by its position times its frequency."""
    half = x.shape[-1] // 2
    frequency = ROTARY_BASE ** (-torch.arange(half, device=x.device) / half)
    angle = (position_T[:, None] * frequency)[:, None, :]  # float32: half precision cannot tell positions apart
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def _causal(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`[b, S, M]` of queries, keys and values `[b, S, heads, C]`."""
    position_S = torch.arange(q.shape[1], device=q.device)
    y, end = [], 0
    for rows in torch.split(position_S, QUERIES):
        end += len(rows)
        mask = seen(rows, position_S[:end], attention.window)
        y.append(attention.attend(q[:, end - len(rows) : end], k[:, :end], v[:, :end], mask))
    return torch.cat(y, dim=1)


def _drawn(attention: Attention, parts: Sequence[Tensor], seed: int) -> Tensor:
    """`[S, M]` of one sample, which draws by this seed; the generators of torch stay as they were."""
    with torch.random.fork_rng([parts[0].device] if parts[0].is_cuda else []):
        torch.manual_seed(seed)
        return _causal(attention, *(part[None] for part in parts))[0]
