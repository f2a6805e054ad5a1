"""PipeMoE's degrees: every one of some, and the planned one, for layers from network-bound to compute-bound.

Experts are as slow as the shape asks: their time t_e is a multiple of the dispatch's, t_d, at the wire's nominal rate.
Routing is even, in chunks of any size too: token i of rank d asks for expert (i + d) mod E, one a device.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from moeplan.profilers.cluster import Cluster
from moeplan.runtime import parallelize
from moeplan.runtime.decisions import PipelineDecision
from moeplan.runtime.plan import Plan
from moeplan.solvers import contiguous
from moeplan.solvers.pipemoe import measured_degrees
from moeplan.solvers.pipemoe.seconds import layer_seconds

from .calibration import Profile
from .case import Case, Figure, Measured
from .model import BACKWARD, EmulatedModel, Sizes, train
from .network import WIRE
from .routing import Workload, plan_of
from .timing import Seconds, interleaved, ratio

Array = np.ndarray
DEGREES = (1, 2, 4, 8)
MOST = 16  # the largest degree that is planned
LAYERS, HIDDEN = 1, 1024
SHAPES = ((128, 0.5, False), (128, 2.0, False), (256, 2.0, False), (128, 2.0, True))  # tokens a rank, t_e/t_d, trained
Degrees = tuple[int, int]  # of the forward and of the backward pass, 0 where there is none


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer, as a step of it and the sizes of its model; `node_bytes` leave every node in a dispatch.

    Parameters
    ----------
    trained
        Whether a backward pass follows, with degrees of its own.
    """

    name: str
    work: Workload
    sizes: Sizes
    node_bytes: float
    trained: bool

    @property
    def fixed(self) -> list[Degrees]:
        """The degrees that are held against the planned ones, the same in both passes."""
        return [(degree, degree * self.trained) for degree in DEGREES]

    def tried(self, profile: Profile) -> list[Degrees]:
        """The fixed degrees and the planned ones, in order."""
        return sorted({*self.fixed, *self.planned(profile)})

    def planned(self, profile: Profile) -> dict[Degrees, str]:
        """The degrees that the profile advises, by the name of the plan: one a pass, or one for both."""
        found = measured_degrees(
            profile.chunk_s,
            partial(self.experts_s, profile),
            n_d=[self.node_bytes],
            n_e=[1.0],
            backward=BACKWARD * self.trained,
            max_degree=MOST,
        )
        joint, apart = int(found.joint[0]), (int(found.forward[0]), int(found.backward[0]))
        return {(joint, joint): "planned for both", apart: "planned"} if self.trained else {(apart[0], 0): "planned"}

    def layer_s(self, profile: Profile, degrees: Degrees) -> float:
        """Seconds of a layer in so many chunks, its exchange of counts left out."""
        passes = zip(degrees, (1.0, BACKWARD), strict=True)
        return sum(self._pass_s(profile, degree, max(degrees), longer) for degree, longer in passes if degree)

    def experts_s(self, profile: Profile, share: Array) -> Array:
        """Seconds of the experts of shares of the layer, a chunk each, forward."""
        waits = self.sizes.start_s + self.sizes.pair_s * self.work.tokens.shape[1] * share
        return profile.wait.seconds(waits)

    def _pass_s(self, profile: Profile, degree: int, pieces: int, longer: float) -> float:
        """Of a pass whose experts are called once a piece."""
        degree_R = np.array([degree])
        call_R = self.experts_s(profile, 1 / np.array([pieces]))
        sent_R, work_R = profile.chunk_s(self.node_bytes / degree_R), pieces / degree * call_R
        return float(layer_seconds(degree_R, sent_R, longer * work_R, sent_R)[0])


def _prepare(cluster: Cluster) -> list[Shape]:
    return [_shape(cluster, *shape) for shape in SHAPES]


def _shape(cluster: Cluster, tokens: int, slower: float, trained: bool) -> Shape:
    size, group = cluster.num_devices, cluster.devices_per_node
    ids = np.broadcast_to(np.arange(size)[:, None, None], (size, LAYERS, 1)).copy()
    work = Workload(ids, np.add.outer(np.arange(size), np.arange(tokens)) % size, size)
    node_bytes = 4 * HIDDEN * group * tokens * (size - group) / size
    pair_s = slower * node_bytes * WIRE.s_per_byte / tokens
    sizes = Sizes(num_experts=size, hidden_size=HIDDEN, pair_s=pair_s, attention_s=0.0)
    name = f"{cluster} {tokens} tokens, t_e = {slower:g} t_d" + ", forward and backward" * trained
    return Shape(name, work, sizes, node_bytes, trained)


def _run(cluster: Cluster, rank: int, profile: Profile, shapes: list[Shape], rounds: int) -> Measured:
    found: dict[str, Seconds] = {}
    for shape in shapes:
        tokens = torch.as_tensor(shape.work.of_rank(rank, cluster.num_devices))
        calls = {}
        for degrees in shape.tried(profile):
            model = parallelize(EmulatedModel(shape.work.ids, shape.sizes), _plan(cluster, shape, degrees))
            calls[_name(shape, degrees)] = partial(train, model, tokens) if shape.trained else partial(model, tokens)
        with torch.inference_mode(not shape.trained):
            found |= interleaved(calls, rounds)
    return found


def _plan(cluster: Cluster, shape: Shape, degrees: Degrees) -> Plan:
    forward, backward = ((degree,) * LAYERS for degree in degrees)
    decided = PipelineDecision(forward=forward, backward=backward if shape.trained else None)
    placement = contiguous.solve(LAYERS, cluster.num_devices, cluster).placement
    return plan_of(cluster, shape.work, shape.sizes, placement, pipeline=decided)


def _name(shape: Shape, degrees: Degrees) -> str:
    return f"{shape.name}/{degrees}"


def _told(_cluster: Cluster, profile: Profile, shapes: list[Shape], measured: Measured) -> list[Figure]:
    return [figure for shape in shapes for figure in _of_shape(profile, shape, measured, pictured=shape is shapes[1])]


def _of_shape(profile: Profile, shape: Shape, measured: Measured, *, pictured: bool) -> list[Figure]:
    planned, figures = shape.planned(profile), []
    found = {degrees: measured[_name(shape, degrees)] for degrees in shape.tried(profile)}
    predicted = {degrees: shape.layer_s(profile, degrees) for degrees in found}
    first, best_s = shape.fixed[0], min(found[degrees].median for degrees in shape.fixed)
    for degrees, seconds in found.items():
        told = {}
        if degrees in planned:
            faster = ratio(found[first], seconds)[0]
            told = {
                "beyond the best fixed, %": seconds.median / best_s - 1,
                "of the model's limit, %": faster * predicted[degrees] / predicted[first],
            }
        name = " and ".join(map(str, dict.fromkeys(filter(None, degrees))))
        figures.append(
            Figure(
                shape.name,
                ", ".join([f"degree {name}", *([planned[degrees]] if degrees in planned else [])]),
                seconds,
                LAYERS * (profile.call_s + predicted[degrees]),
                ratio(found[first], seconds),
                told,
                f"PipeMoE {shape.name}: degree" if pictured else "",
                degrees[0] if pictured else None,
                "layer",
            )
        )
    return figures


PIPELINING = Case(_prepare, _run, _told)
