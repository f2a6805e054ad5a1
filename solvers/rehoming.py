"""The homes that a sample policy gives the samples of one step after one layer: what plans are judged by and runs carry
out.

Legend: I samples of a step; D devices.
"""

import numpy as np
from numpy.typing import NDArray

from ..profilers.cluster import Cluster
from . import luffy, netmoe
from .arrays import Floats
from .luffy import Attention, Law


def fault(method: str, law: Law | None, *, predicts: bool | None = None) -> str | None:
    """Fault of a policy of this method, attention law and, unless None is said, predictor; None: no fault."""
    methods = netmoe.METHODS if law is None else luffy.METHODS
    if method not in methods:
        beside = "" if law is None else " with an attention law"
        return f"sample policy by {method!r:.20}{beside}; expected {' or '.join(methods)}"
    if predicts is not None and predicts == (law is None and method == "paper"):
        return f"a policy by {method} with the wrong predictor: only NetMoE's paper has none"
    return None


def rehome(
    method: str,
    copies: NDArray[np.integer],
    pairs: NDArray[np.integer],
    cluster: Cluster,
    *,
    attention: Attention | None = None,
    next_copies: Floats | None = None,
    copy_bytes: float | None = None,
    bounded: bool = True,
) -> netmoe.Rehomed:
    """The homes by a method of LUFFY where attention counts, else of NetMoE; parameters as in both."""
    if attention is not None:
        return luffy.rehome(
            method, copies, pairs, cluster, attention, next_copies=next_copies, copy_bytes=copy_bytes, bounded=bounded
        )
    return netmoe.rehome(
        method, copies, pairs, cluster, next_copies=next_copies, copy_bytes=copy_bytes, bounded=bounded
    )


def compile_rehoming(method: str, law: Law | None, cluster: Cluster) -> float:
    """Compile what re-homes samples on such a cluster, or load it; the seconds that took, none without a compiler."""
    return netmoe.compile_rehoming(method, cluster) if law is None else luffy.compile_rehoming(cluster)
