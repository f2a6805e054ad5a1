"""What the proof beside a plan proves of its bound.

Legend: L MoE layers; E experts; W transitions.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError, InputError
from ...files import size_of
from ...runtime.plan import Plan
from ..proof import Proof
from .prices import kept_by_prices
from .structure import placement_options

__all__ = ["proven_shares"]


def proven_shares(
    plan: Plan, tables: NDArray[np.float64], levels: Mapping[str, list[int]], folder: Path
) -> dict[str, float] | str:
    """By level, "device" or "node", the share of W `[L-1, E, E]` that may stay there at most; or why none is proven.

    Parameters
    ----------
    levels
        The slots of the places of each level.

    Raises
    ------
    CertificationError
        The file is another one than the plan names, or no proof.
    """
    search = placement_options(plan).search
    named = None if search is None else search.proof
    if named is None:
        return "the plan names no proof"
    path, shape = folder / named.file, (len(tables) + 1, plan.model.num_experts, plan.model.num_experts + 4)
    if not path.exists():
        return f"no {named.file} beside the plan"
    try:
        if (size := size_of(path, what="the proof of a bound")) > Proof.most_bytes(shape):
            raise InputError(f"{size:,} bytes; expected a proof of at most {Proof.most_bytes(shape):,}")
        contents = path.read_bytes()
        if hashlib.sha256(contents).hexdigest() != named.sha256:
            raise InputError("another proof than the plan's; re-run moeplan solve")
        proof = Proof.from_bytes(contents, shape)
    except InputError as error:
        raise CertificationError(f"{path}: {error}") from error
    shares = {}
    for level, table in proof.levels.items():
        widths = levels.get(level, [])
        if len(set(widths)) != 1 or sum(widths) != plan.model.num_experts:
            raise CertificationError(f"{path}: prices of a {level}; the plan's have replicas or unequal slots, or none")
        kept = kept_by_prices(tables, table, widths[0])
        if kept is None:
            return "too many groups of experts come close"
        shares[level] = float(np.floor(kept)) / max(float(tables.sum()), 1.0)  # transitions are whole
    return shares
