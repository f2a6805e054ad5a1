"""PipeMoE's degrees: every one of some, and the planned one, for layers from network-bound to compute-bound.

Experts are as slow as the shape asks: their time t_e is a multiple of the dispatch's, t_d, at the wire's nominal rate.
Routing is even: token i of every rank asks for expert i mod E, one a device.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from moeplan.profilers.cluster import Cluster
from moeplan.runtime import parallelize
from moeplan.runtime.decisions import PipelineDecision
from moeplan.solvers import contiguous
from moeplan.solvers.pipemoe import measured_degrees
from moeplan.solvers.pipemoe.seconds import layer_seconds

from .calibration import Profile
from .case import Case, Measured
from .figures import Figure
from .model import EmulatedModel, Sizes
from .network import WIRE
from .routing import Workload, plan_of
from .timing import Seconds, interleaved, ratio

Array = np.ndarray
DEGREES = (1, 2, 4, 8)
MOST = 16  # the largest degree that is planned
LAYERS, HIDDEN = 1, 1024
SHAPES = ((128, 0.5), (128, 2.0), (256, 2.0))  # tokens a rank, t_e / t_d


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer, as a step of it and the sizes of its model; `node_bytes` leave every node in a dispatch."""

    name: str
    work: Workload
    sizes: Sizes
    node_bytes: float

    def planned(self, profile: Profile) -> int:
        """The degree that the profile advises."""
        found = measured_degrees(
            profile.chunk_s,
            partial(self.experts_s, profile),
            n_d=[self.node_bytes],
            n_e=[1.0],
            backward=0.0,
            max_degree=MOST,
        )
        return int(found.forward[0])

    def layer_s(self, profile: Profile, degree: int) -> float:
        """Seconds of a layer in so many chunks, its exchange of counts left out."""
        degree_R = np.array([degree])
        sent_R = profile.chunk_s(self.node_bytes / degree_R)
        return float(layer_seconds(degree_R, sent_R, self.experts_s(profile, 1 / degree_R), sent_R)[0])

    def experts_s(self, profile: Profile, share: Array) -> Array:
        """Seconds of the experts of shares of the layer, a chunk each."""
        waits = self.sizes.start_s + self.sizes.pair_s * self.work.tokens.shape[1] * share
        return profile.wait.seconds(waits)


def _prepare(cluster: Cluster) -> list[Shape]:
    return [_shape(cluster, tokens, slower) for tokens, slower in SHAPES]


def _shape(cluster: Cluster, tokens: int, slower: float) -> Shape:
    size, group = cluster.num_devices, cluster.devices_per_node
    ids = np.broadcast_to(np.arange(size)[:, None, None], (size, LAYERS, 1)).copy()
    work = Workload(ids, np.tile(np.arange(tokens) % size, (size, 1)), size)
    node_bytes = 4 * HIDDEN * group * tokens * (size - group) / size
    pair_s = slower * node_bytes * WIRE.s_per_byte / tokens
    sizes = Sizes(num_experts=size, hidden_size=HIDDEN, pair_s=pair_s, attention_s=0.0)
    return Shape(f"{cluster} {tokens} tokens, t_e = {slower:g} t_d", work, sizes, node_bytes)


def _run(cluster: Cluster, rank: int, profile: Profile, shapes: list[Shape], rounds: int) -> Measured:
    found: dict[str, Seconds] = {}
    for shape in shapes:
        tokens = torch.as_tensor(shape.work.of_rank(rank, cluster.num_devices))
        placement = contiguous.solve(LAYERS, cluster.num_devices, cluster).placement
        calls = {}
        for degree in sorted({*DEGREES, shape.planned(profile)}):
            decided = PipelineDecision(forward=(degree,) * LAYERS, backward=None)
            plan = plan_of(cluster, shape.work, shape.sizes, placement, pipeline=decided)
            model = parallelize(EmulatedModel(shape.work.ids, shape.sizes).eval(), plan)
            calls[f"{shape.name}/{degree}"] = partial(model, tokens)
        with torch.inference_mode():
            found |= interleaved(calls, rounds)
    return found


def _told(_cluster: Cluster, profile: Profile, shapes: list[Shape], measured: Measured) -> list[Figure]:
    return [figure for shape in shapes for figure in _of_shape(profile, shape, measured, pictured=shape is shapes[1])]


def _of_shape(profile: Profile, shape: Shape, measured: Measured, *, pictured: bool) -> list[Figure]:
    planned = shape.planned(profile)
    found = {degree: measured[f"{shape.name}/{degree}"] for degree in sorted({*DEGREES, planned})}
    predicted = {degree: shape.layer_s(profile, degree) for degree in found}
    best_s, figures = min(found[degree].median for degree in DEGREES), []
    for degree, seconds in found.items():
        told = {}
        if degree == planned:
            faster = ratio(found[1], seconds)[0]
            told = {
                "beyond the best fixed, %": seconds.median / best_s - 1,
                "of the model's limit, %": faster * predicted[planned] / predicted[1],
            }
        predicted_s = LAYERS * (profile.call_s + predicted[degree])
        name = f"degree {degree}" + ", planned" * (degree == planned)
        axis = f"PipeMoE {shape.name}: degree" if pictured else ""
        figures.append(
            Figure(
                shape.name,
                name,
                seconds,
                predicted_s,
                ratio(found[1], seconds),
                told,
                axis,
                degree if pictured else None,
            )
        )
    return figures


PIPELINING = Case(_prepare, _run, _told)
