"""Attention of whole samples that see themselves, and of scattered tokens to the samples they belong to.

Samples of one length attend at once, some queries at a time; scattered tokens in runs, many samples at once.

Legend: T tokens, by sample, then position; b samples of one length S, or runs at once; R rows of keys and values;
M hidden size; C samples, or runs: tokens of one sample, at most `QUERIES` of them; Q most queries and S most keys of a
run.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..models.protocols import Attention
from .contexts import Contexts, Held

QUERIES = 1024  # of whole samples at once, and of a run: bounds a mask to this many rows
KEYS = 2**16  # of the runs at once, whose keys and values are copied
PAIRS = 2**21  # of queries and keys at once, for each of which and each head there is a number


def attended(
    attention: Attention, x_TM: Tensor, position_T: Tensor, lengths: Sequence[int], seeds: Sequence[int] = ()
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
        alike = [place for place, tokens in enumerate(at_least_one) if tokens == length]
        stacked = (torch.stack(part) for part in zip(*(by_sample[place] for place in alike), strict=True))
        for place, y_SM in zip(alike, _causal(attention, *stacked), strict=True):
            y[place] = y_SM
    return torch.cat(y)


def attend_contexts(attention: Attention, q: Tensor, kv_R2: Tensor, held: Held, contexts: Contexts) -> Held:
    """The held tokens with what attention adds to them: each sees its sample up to itself, or a window of that.

    Parameters
    ----------
    q, kv_R2
        Queries `[T, heads, d]`; keys and values `[R, 2, kv heads, d]`, where `contexts.row` says.
    """
    if not len(q):
        return held
    context_T, position_T, y_TM = contexts.context[held.token], contexts.position[held.token], held.x.clone()
    start_C, count_C = _runs(context_T)
    last_C = position_T[start_C + count_C - 1]
    begin_C = torch.zeros_like(last_C)
    if attention.window is not None:
        begin_C = (position_T[start_C] - attention.window + 1).clamp(min=0)
    keys_C = last_C - begin_C + 1
    for run_b in batches(count_C, keys_C):
        ordinal_Q = torch.arange(int(count_C[run_b].max()), device=q.device)
        query_bQ = start_C[run_b, None] + torch.minimum(ordinal_Q, count_C[run_b, None] - 1)
        key_bS = begin_C[run_b, None] + torch.arange(int(keys_C[run_b].max()), device=q.device)
        mask_bQS = _seen(position_T[query_bQ], key_bS, attention.window)  # none sees the padding, which comes last
        row_bS = contexts.row(context_T[start_C[run_b], None], torch.minimum(key_bS, last_C[run_b, None]))
        k, v = _rows(kv_R2, row_bS).unbind(2)
        real_bQ = ordinal_Q < count_C[run_b, None]
        y_TM[query_bQ[real_bQ]] += attention.attend(_rows(q, query_bQ), k, v, mask_bQS)[real_bQ]
    return Held(y_TM, held.token)


def batches(count_C: Tensor, keys_C: Tensor) -> Iterator[Tensor]:
    """The runs that attend at once, int64 `[b]`: each is padded to the most queries and keys of any of them.

    None has twice the queries of another, so that less than half of the queries are padding.

    Parameters
    ----------
    count_C, keys_C
        Queries of every run, below 2**24, and keys.
    """
    by_keys_C, octave_C = keys_C.argsort(), torch.frexp(count_C.float()).exponent
    order_C = by_keys_C[octave_C[by_keys_C].argsort(stable=True)]
    sizes = octave_C.bincount().tolist()
    for run_C in filter(len, torch.split(order_C, sizes)):
        most_keys = int(keys_C[run_C[-1]])
        at_once = min(KEYS // most_keys, PAIRS // (int(count_C[run_C].max()) * most_keys))
        yield from torch.split(run_C, max(1, at_once))


def _seen(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Mask of the keys that queries at these positions `[..., Tq]` see at those `[..., Tk]`, bool `[..., Tq, Tk]`."""
    back = query[..., None] - key[..., None, :]
    return back >= 0 if window is None else (back >= 0) & (back < window)


def _causal(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`[b, S, M]` of queries, keys and values `[b, S, heads, d]`."""
    position_S = torch.arange(q.shape[1], device=q.device)
    y, end = [], 0
    for rows in torch.split(position_S, QUERIES):
        end += len(rows)
        mask = _seen(rows, position_S[:end], attention.window)
        y.append(attention.attend(q[:, end - len(rows) : end], k[:, :end], v[:, :end], mask))
    return torch.cat(y, dim=1)


def _drawn(attention: Attention, parts: Sequence[Tensor], seed: int) -> Tensor:
    """`[S, M]` of one sample, which draws by this seed; the generators of torch stay as they were."""
    with torch.random.fork_rng([parts[0].device] if parts[0].is_cuda else []):
        torch.manual_seed(seed)
        return _causal(attention, *(part[None] for part in parts))[0]


def _rows(rows: Tensor, index: Tensor) -> Tensor:
    """`rows[index]`, some times faster on a CPU."""
    return rows.index_select(0, index.flatten()).view(*index.shape, *rows.shape[1:])


def _runs(context_T: Tensor) -> tuple[Tensor, Tensor]:
    """Start of each run and its number of tokens, int64 `[C]`."""
    _, context_of, count = torch.unique_consecutive(context_T, return_inverse=True, return_counts=True)
    ordinal_T = torch.arange(len(context_T), device=context_T.device) - (count.cumsum(0) - count)[context_of]
    start_C = (ordinal_T % QUERIES == 0).nonzero().flatten()
    return start_C, torch.diff(start_C, append=start_C.new_tensor([len(context_T)]))
