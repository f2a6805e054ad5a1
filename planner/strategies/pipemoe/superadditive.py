"""Share of a pipeline's gain due to the experts' curve: chunks that together take less than the whole.

Work cut into pieces takes no less on a device; a fitted curve may say so where it bends upwards or steps.

Legend: C chunks.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ....runtime.plan import Plan
from ....solvers.pipemoe.seconds import chunk_seconds
from ...options import PipelineOptions, StageSeconds

__all__ = ["curve_gain"]

Seconds = NDArray[np.float64]


def curve_gain(plan: Plan, options: PipelineOptions) -> tuple[float, float]:
    """Seconds that chunks save over one piece, and those of them that are lost if none is faster than its part of it.

    Notes
    -----
    By the means over the fitted steps that the plan holds, layer by layer and pass by pass, with s_i the share of a
    layer in chunk i,

        t_e(i) = max( curve(i), s_i curve(whole) )                                                              (1)

    where curve(i) is of all calls of the chunk's experts.
    """
    gained = lifted = 0.0
    for shares, stages, whole in _layers(plan, options):
        slower = np.maximum(stages[1], shares * whole[1][0])  # (1)
        taken, honest = (
            float(chunk_seconds(stages[0], experts, stages[2], full_duplex=options.full_duplex))
            for experts in (stages[1], slower)
        )
        gained += float(sum(stage[0] for stage in whole)) - taken
        lifted += honest - taken
    return gained, lifted


def _layers(plan: Plan, options: PipelineOptions) -> Iterator[tuple[Seconds, list[Seconds], list[Seconds]]]:
    """The shares of the chunks, their seconds in three stages, and those of the whole, `[C]` each."""
    decision = plan.decisions.pipeline
    assert decision is not None
    there, back = (None, None) if decision.shares is None else (decision.shares.forward, decision.shares.backward)
    passes = (
        (decision.forward, options.forward, there, 1, 1.0),
        (decision.backward, options.backward_pass, back, -1, options.backward),
    )
    for degrees, stages, uneven, order, slower in passes:
        for layer, degree in enumerate(degrees or () if stages is not None else ()):
            share_C = np.full(degree, 1 / degree) if uneven is None else np.array(uneven[layer])
            assert stages is not None
            dispatch, experts, combine = _columns(options.whole, layer, 1)
            yield share_C, _columns(stages, layer, degree)[::order], [dispatch, slower * experts, combine][::order]


def _columns(stages: StageSeconds, layer: int, degree: int) -> list[Seconds]:
    return [np.resize(np.array(column[layer]), degree) for _, column in stages]
