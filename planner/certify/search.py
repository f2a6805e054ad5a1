"""What exflow says of its search, as far as the placement and the fitted tokens tell.

Legend: L MoE layers; E experts.
"""

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError
from ...runtime.plan import Plan
from .certificate import TOLERANCE, Certificate
from .structure import device_ratios, placement_options

__all__ = ["Apart", "check_cap", "check_stages"]

STAGES = ("nodes", "devices", "joint")


class Apart(NamedTuple):
    """The shares of transitions (or pairs) that leave their node, and that leave their device but not their node."""

    inter: float
    intra: float


def check_cap(plan: Plan, loads: NDArray[np.int64], certificate: Certificate) -> None:
    """Refuse a placement that breaks its own cap on the fitted loads `[L, E]`."""
    search = placement_options(plan).search
    if search is None or search.cap is None:
        return
    highest = max(device_ratios(plan, loads))
    if highest > search.cap.max_load * (1 + TOLERANCE):
        raise CertificationError(f"a device holds {highest:.6g} times a layer's mean; the cap is {search.cap.max_load}")
    certificate.checks.append("cap on loads")
    certificate.unchecked.append("what the cap costs")


def check_stages(plan: Plan, apart: Apart | None, inter_ratio: float, certificate: Certificate) -> None:
    """Refuse stages that a search does not go through, or whose last one is not the placement.

    Parameters
    ----------
    apart
        Of the placement; None where counts do not tell.
    inter_ratio
        The cost of a hop between nodes, in hops inside one.
    """
    options = placement_options(plan)
    stages = () if options.search is None else options.search.stages
    if not stages:
        return
    costs = [inter_ratio * stage.inter_hops + stage.intra_hops for stage in stages]
    inter = [stage.inter_hops for stage in stages[:2]]
    if (
        tuple(stage.name for stage in stages) != STAGES[: len(stages)]
        or max(inter) - min(inter) > TOLERANCE
        or any(later > sooner + TOLERANCE * inter_ratio for sooner, later in itertools.pairwise(costs))
    ):
        raise CertificationError(f"stages {[stage.name for stage in stages]} that cost {costs}; expected ever less")
    moved_on = options.method == "ilp" or options.replanned is not None
    if apart is None or len(stages) < len(STAGES) or moved_on:
        certificate.unchecked.append("hops after each stage")
        return
    certificate.agree("hops between nodes after the last stage", stages[-1].inter_hops, apart.inter)
    certificate.agree("hops inside nodes after the last stage", stages[-1].intra_hops, apart.intra)
    certificate.checks.append("last stage")
    certificate.unchecked.append("hops after the stages before")
