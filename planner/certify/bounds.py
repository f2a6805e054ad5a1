"""Bounds of what a placement keeps together, proved again: two layers at a time, and by the prices beside a plan.

Legend: L MoE layers; E experts; W tables of pairs of experts.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError, InputError
from ...files import size_of
from ...runtime.decisions import SidecarFile
from ..strategies.exflow.proof import Proof
from .prices import kept_by_prices

__all__ = ["proven_shares", "share_kept"]

Tables = NDArray[np.float64]


def share_kept(tables: Tables, widths: list[int]) -> float:
    """The share of W `[W, E, E]` that may stay on places of these widths, each table alone."""
    total = float(tables.sum())
    return sum(_most_kept(table, widths) for table in tables if table.any()) / total if total else 1.0


def _most_kept(table_EE: Tables, widths: list[int]) -> float:
    """The better of the transportation bound, by linear programming, and the spectral one, for one layer pair.

    An expert meets at most the largest place's experts; all places together join sum S^2 pairs, no more and no fewer.
    """
    from scipy.optimize import linprog
    from scipy.sparse import eye_array, kron, vstack

    size, most = len(table_EE), max(widths)
    one = np.ones((1, size))
    rows, columns = kron(eye_array(size), one), kron(one, eye_array(size))
    limits, pairs = vstack([rows, columns], format="csr"), [sum(width**2 for width in widths)]
    found = linprog(
        -table_EE.ravel(),
        A_ub=limits,
        b_ub=np.full(2 * size, most),
        A_eq=np.ones((1, size * size)),
        b_eq=pairs,
        bounds=(0, 1),
        method="highs",
    )
    return min(-float(found.fun), _spectral(table_EE, widths))


def _spectral(table_EE: Tables, widths: list[int]) -> float:
    """W.sum()/D + C times the sum of the top D-1 singular values of the doubly centred W, for equal slots C."""
    if len(set(widths)) > 1:
        return float(table_EE.sum())
    size, places = len(table_EE), len(widths)
    project = np.eye(size) - 1 / size
    sigma = np.linalg.svd(project @ table_EE @ project, compute_uv=False)
    return float(table_EE.sum() / places + widths[0] * sigma[: places - 1].sum())


def proven_shares(
    named: SidecarFile | None, tables: Tables, levels: Mapping[str, list[int]], folder: Path
) -> dict[str, float] | str:
    """By level, "device" or "node", the share of W `[L-1, E, E]` that may stay there at most; or why none is proven.

    Parameters
    ----------
    named
        The proof that a plan names.
    levels
        The slots of the places of each level.

    Raises
    ------
    CertificationError
        The file is another one than the plan names, or no proof.
    """
    if named is None:
        return "the plan names no proof"
    num_experts = tables.shape[1]
    path, shape = folder / named.file, (len(tables) + 1, num_experts, num_experts + 4)
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
        if len(set(widths)) != 1 or sum(widths) != num_experts:
            raise CertificationError(f"{path}: prices of a {level}; the plan's have replicas or unequal slots, or none")
        kept = kept_by_prices(tables, table, widths[0])
        if kept is None:
            return "too many groups of experts come close"
        shares[level] = float(np.floor(kept)) / max(float(tables.sum()), 1.0)  # transitions are whole
    return shares
