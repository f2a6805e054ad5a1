"""Real traces that ship, as arrays of expert ids that `write_example` turns into a trace.

`NAME.npz.xz` holds whole sequences: `expert_ids` uint8 `[T, L, K]`, largest gate weight first, one sequence after the
other; `seq_id`, `first_pos` and `num_tokens` `[I]`: each sequence's id, its first token's position and its length. In
as many bytes Parquet, zstd at its highest level, holds a sixth fewer tokens.

Legend: T tokens; I samples (sequences); L MoE layers; K experts per token.
"""

import os
from importlib.resources import files

import numpy as np

from ...errors import UsageError
from ...files import atomic_directory
from ..model import Attention, ModelSpec
from ..part_file import local_directory
from ..reader import Trace, open_trace
from ..schema import PHASES, TokenBatch, TraceMeta
from ..writer import TraceWriter

__all__ = ["CLUSTER", "EXAMPLES", "NOTES", "example_tokens", "write_example"]

CLUSTER = "2x8"  # that the first journey with an example plans for
EXAMPLES = {
    "gpt-oss-20b": ModelSpec(
        name="gpt-oss-20b",
        layer_ids=tuple(range(24)),
        num_experts=32,
        top_k=4,
        num_hidden_layers=24,
        num_mtp_layers=0,
        num_shared_experts=0,
        hidden_size=2880,
        ffn_size=2880,
        dtype_bytes=2,
        attention=Attention(kv_size=1024, num_heads=64, num_kv_heads=8),
    )
}

NOTES = {  # what an example's sizes do not say
    "gpt-oss-20b": "seconds and GB are of bf16; its checkpoint holds experts as MXFP4, about a quarter of the bytes",
}


def write_example(name: str, destination: str | os.PathLike[str]) -> Trace:
    """Write the example `name` of `EXAMPLES` as a trace of decoded tokens; a sample is a sequence.

    Every time it has the same hash, so that a plan of one copy certifies on another.

    Raises
    ------
    UsageError
        There is no such example, or the destination is there and not empty.
    StorageError
        The destination cannot be written; it appears whole or not at all.
    """
    if name not in EXAMPLES:
        raise UsageError(f"example {name!r:.60}; expected {', '.join(EXAMPLES)}")
    folder = local_directory(destination)
    meta = TraceMeta(form="tokens", model=EXAMPLES[name], recorder=f"moeplan example {name}")
    with atomic_directory(folder) as directory, TraceWriter(directory, meta, start_ns=0) as writer:
        writer.append(example_tokens(name))
    return open_trace(folder)


def example_tokens(name: str) -> TokenBatch:
    """All tokens of the example `name`."""
    import io
    import lzma

    packed = (files(__package__) / f"{name}.npz.xz").read_bytes()
    with np.load(io.BytesIO(lzma.decompress(packed)), allow_pickle=False) as arrays:
        ids_TLK, length_I = arrays["expert_ids"], arrays["num_tokens"]
        sample_I, first_I = arrays["seq_id"], arrays["first_pos"]
    num_tokens, start_I = len(ids_TLK), np.cumsum(length_I) - length_I
    return TokenBatch(
        step=None,
        sample=np.repeat(sample_I, length_I).astype(np.int64),
        position=(np.arange(num_tokens) + np.repeat(first_I - start_I, length_I)).astype(np.int32),
        source_rank=None,
        phase=np.full(num_tokens, PHASES.index("decode"), np.int8),
        ids=ids_TLK.astype(np.uint16),
    )
