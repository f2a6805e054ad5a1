"""Rates by which replicas are moved: the cost model's curves as straight lines about the sizes of a trace.

Legend: B steps; L MoE layers; E experts; D devices.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ....runtime.wire import Wire, copy_bytes
from ....solvers.arrays import Floats
from ....solvers.flexmoe import Costs
from ....solvers.ports import link_classes
from ....solvers.seconds import Curve3
from ...evaluate.scene import Scene

Sized = Callable[[Floats], Floats]  # sizes to seconds
UNTIMED = Costs._make([1.0, *[0.0] * (len(Costs._fields) - 2), True])  # pairs on the busiest device alone


def rates(scene: Scene, pairs: NDArray[np.integer], slots: int, wire: Wire | None = None) -> tuple[Costs, float] | None:
    """The rates for steps of these pairs, `[B, L, E, D]`, and the seconds of a layer that no placement changes.

    None where a part of a step is not timed. `wire`: the form in which hidden vectors travel.

    Notes
    -----
    A curve t over a size becomes the line through its times at half the mean size of the trace and at one and a half:
    experts at the pairs of a device, forward and backward; even exchanges at the bytes of a device's pairs; sums and
    moves, which go between few devices, at an expert's weights and its state.
    """
    costs, model, passes = scene.costs, scene.model, scene.passes
    each, state, copy = model.expert_bytes, model.expert_state_bytes, copy_bytes(model, wire)
    if (
        costs is None
        or not costs.exchange
        or costs.experts is None
        or each is None
        or state is None
        or copy is None
        or passes is None
    ):
        return None
    mean = pairs.sum() / max(np.prod(pairs.shape[:2]) * pairs.shape[3], 1)
    experts, passed = costs.experts, 1 + passes.backward

    def computed(tokens: Floats) -> Floats:
        return experts(tokens, np.full(tokens.shape, float(slots))).seconds

    fixed_s, pair_s = _line(computed, mean)
    links = {}
    for link, curve in zip(link_classes(scene.cluster), costs.exchange, strict=True):
        links[link] = *_line(_seconds(curve, 1.0), copy * mean), *_line(_seconds(curve, 0.0), each + state)
    near = links.get("intra", links.get("inter"))
    far = links.get("inter", near)
    assert near is not None
    assert far is not None
    costs_of_moves = Costs(
        pair_s=passed * pair_s,
        copy_bytes=float(copy),
        intra_latency_s=near[0],
        intra_s_per_byte=near[1],
        inter_latency_s=far[0],
        inter_s_per_byte=far[1],
        gradient_bytes=float(each),
        intra_sum_s_per_byte=near[3],
        inter_sum_s_per_byte=far[3],
        moved_bytes=float(state),
        moves_s=far[2],
    )
    return costs_of_moves, passed * fixed_s


def _seconds(curve: Curve3, evenness: float) -> Sized:
    """A curve of exchanges over bytes through the busiest port, of a device that sends itself nothing."""
    return lambda size: curve(size, size, np.full(size.shape, evenness)).seconds


def _line(curve: Sized, size: float) -> tuple[float, float]:
    """Seconds at nothing, and a unit, of the line through a curve about a size."""
    ends = np.array([0.5, 1.5]) * max(size, 1.0)
    start_s, end_s = curve(ends)
    slope = max(float(end_s - start_s) / (ends[1] - ends[0]), 0.0)
    return max(float(start_s) - slope * ends[0], 0.0), slope
