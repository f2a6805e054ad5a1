"""Write the shipped example anew from the whole recording: `python -m benchmarks.write_example [ROUTING.npz]`.

Whole sequences are drawn by the hash by which a solve splits samples, under a seed that no solve can have: a draw under
a solve's own seed would lie on one side of its split. The share is the largest, in thousandths, that fits.

The seed is chosen: the first of -1, -2, ... whose copies, hops kept and balance (contiguous, 2x8, steps by default) lie
within the whole recording's intervals. -1 to -3 missed that of balance, as most draws do, from below: samples fill
steps by ascending id, and a step of a third of the sequences mixes more subjects.

Legend: T tokens; I sequences; L MoE layers; K experts per token.
"""

import io
import lzma
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.routing import GPT_OSS
from benchmarks.study import DEFAULT_DATA
from moeplan.traces.split import fitted

SEED = -4
SHARE = 0.285
MAX_BYTES = 1_500_000
NAME = "gpt-oss-20b.npz.xz"


def drawn(path: Path, share: float = SHARE) -> dict[str, Any]:
    """The arrays of the sequences whose hash lies below `share`, as `moeplan.traces.examples` reads them."""
    with np.load(path) as arrays:
        seq_T, pos_T, ids_TLK = arrays["seq_id"], arrays["pos"], arrays["expert_ids"]
    seq_I, start_I, length_I = np.unique(seq_T, return_index=True, return_counts=True)
    kept_I = fitted(seq_I, seed=SEED, fraction=share)
    whole = [slice(start, start + length) for start, length in zip(start_I[kept_I], length_I[kept_I], strict=True)]
    for rows, seq in zip(whole, seq_I[kept_I], strict=True):
        assert (seq_T[rows] == seq).all()
        assert (np.diff(pos_T[rows]) == 1).all()
    return {
        "expert_ids": np.concatenate([ids_TLK[rows] for rows in whole]),
        "seq_id": seq_I[kept_I],
        "first_pos": pos_T[start_I[kept_I]],
        "num_tokens": length_I[kept_I],
    }


def packed(arrays: dict[str, Any]) -> bytes:
    """The bytes of the file."""
    whole = io.BytesIO()
    np.savez(whole, **arrays)
    return lzma.compress(whole.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def main() -> None:
    """Write the file, which has to be committed with its hash in the notice."""
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_DATA / GPT_OSS
    content = packed(drawn(source))
    assert len(content) <= MAX_BYTES, f"{len(content):,} bytes; expected at most {MAX_BYTES:,}: lower SHARE"
    (Path(__file__).parents[1] / "traces" / "examples" / NAME).write_bytes(content)


if __name__ == "__main__":
    main()
