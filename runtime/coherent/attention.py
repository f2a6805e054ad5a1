"""Attention of scattered tokens to the samples they belong to, in runs, many samples at once.

Legend: T tokens, by sample, then position; b runs at once; R rows of keys and values; M hidden size; C runs: tokens of
one sample, at most `QUERIES` of them; Q most queries and S most keys of a run.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...profilers.attended import QUERIES, seen
from ..models.protocols import Attention
from .contexts import Contexts, Held

KEYS = 2**16  # of the runs at once, whose keys and values are copied
PAIRS = 2**21  # of queries and keys at once, for each of which and each head there is a number


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
        mask_bQS = seen(position_T[query_bQ], key_bS, attention.window)  # none sees the padding, which comes last
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


def _rows(rows: Tensor, index: Tensor) -> Tensor:
    """`rows[index]`, some times faster on a CPU."""
    return rows.index_select(0, index.flatten()).view(*index.shape, *rows.shape[1:])


def _runs(context_T: Tensor) -> tuple[Tensor, Tensor]:
    """Start of each run and its number of tokens, int64 `[C]`."""
    _, context_of, count = torch.unique_consecutive(context_T, return_inverse=True, return_counts=True)
    ordinal_T = torch.arange(len(context_T), device=context_T.device) - (count.cumsum(0) - count)[context_of]
    start_C = (ordinal_T % QUERIES == 0).nonzero().flatten()
    return start_C, torch.diff(start_C, append=start_C.new_tensor([len(context_T)]))
