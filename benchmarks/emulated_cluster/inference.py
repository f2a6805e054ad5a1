"""ExFlow's inference: tokens that stay where their experts are, beside tokens that return after every layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from moeplan.profilers.cluster import Cluster
from moeplan.runtime import parallelize
from moeplan.solvers import contiguous, exflow
from moeplan.solvers.placement import Placement

from ..routing import transitions
from .calibration import Profile
from .case import Case, Figure, Measured
from .model import EmulatedModel, Sizes
from .prediction import Predictor, devices_of, generated
from .routing import Workload, affine, plan_of, with_second
from .timing import Seconds, interleaved, ratio

NEW = 3  # tokens generated after each token of the step
USES = ((64, 0, 1), (512, 0, 1), (64, NEW, 1), (64, 0, 2))  # elements of K and V of 1,024, new tokens, K
LAYERS, EXPERTS_A_DEVICE, KINDS, SAMPLES, LENGTH = 12, 4, 1024, 4, 32  # samples a rank
SEED = 11
WAYS: dict[str, tuple[int, Literal["standard", "coherent"]]] = {
    "contiguous, standard": (0, "standard"),
    "contiguous, coherent": (0, "coherent"),
    "exflow, coherent": (1, "coherent"),
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """The step, two experts per token, and its placements: contiguous, and planned for the first of other kinds."""

    work: Workload
    placements: tuple[Placement, Placement]


@dataclass(frozen=True, slots=True)
class Instance:
    """One use of the model: whole sequences, or `new` tokens after prompts of one."""

    name: str
    work: Workload
    sizes: Sizes
    new: int


def _prepare(cluster: Cluster) -> Prepared:
    rng, num_experts = np.random.default_rng(SEED), EXPERTS_A_DEVICE * cluster.num_devices
    ids = affine(rng, LAYERS, num_experts, KINDS)
    tokens = 2 * rng.integers(KINDS // 2, size=(SAMPLES * cluster.num_devices, LENGTH)) + 1
    even = contiguous.solve(LAYERS, num_experts, cluster).placement
    planned = exflow.solve(transitions(ids[::2, :, 0], num_experts), cluster, seed=SEED, work=1e8).placement
    return Prepared(Workload(with_second(rng, ids, num_experts), tokens, num_experts), (even, planned))


def _run(cluster: Cluster, rank: int, _profile: Profile, given: Prepared, rounds: int) -> Measured:
    found: dict[str, Seconds] = {}
    for instance in _instances(cluster, given):
        tokens = torch.as_tensor(instance.work.of_rank(rank, cluster.num_devices))
        calls = {}
        for way, (placed, dispatch) in WAYS.items():
            plan = plan_of(cluster, instance.work, instance.sizes, given.placements[placed])
            model = parallelize(EmulatedModel(instance.work.ids, instance.sizes).eval(), plan, dispatch=dispatch)
            calls[f"{instance.name}/{way}"] = (
                partial(model.generate, tokens.reshape(-1, 1), instance.new) if instance.new else partial(model, tokens)
            )
        with torch.inference_mode():
            found |= interleaved(calls, rounds)
    return found


def _told(cluster: Cluster, profile: Profile, given: Prepared, measured: Measured) -> list[Figure]:
    figures = []
    for instance in _instances(cluster, given):
        first = measured[f"{instance.name}/contiguous, standard"]
        for way, (placed, dispatch) in WAYS.items():
            seconds, placement = measured[f"{instance.name}/{way}"], given.placements[placed]
            told = {
                "kept on a device, %": kept(instance.work, placement, 1),
                "kept on a node, %": kept(instance.work, placement, cluster.devices_per_node),
            }
            predicted_s = _predicted(cluster, profile, instance, placement, coherent=dispatch == "coherent")
            pictured = instance.new == 0 and instance.work.ids.shape[2] == 1
            axis = f"ExFlow {cluster}, prefill: kv/d" if pictured else ""
            size = instance.sizes.kv_size / instance.sizes.hidden_size if axis else None
            figures.append(Figure(instance.name, way, seconds, predicted_s, ratio(first, seconds), told, axis, size))
    return figures


def _predicted(
    cluster: Cluster, profile: Profile, instance: Instance, placement: Placement, *, coherent: bool
) -> float:
    steps = [
        Predictor.of(profile, cluster, instance.work, instance.sizes, placement, after)
        for after in range(instance.new or 1)
    ]
    if instance.new:
        return generated(steps, coherent=coherent)
    return steps[0].coherent() if coherent else steps[0].standard()


def _instances(cluster: Cluster, given: Prepared) -> Iterator[Instance]:
    whole = given.work
    for kv_size, new, top_k in USES:
        sizes = Sizes(num_experts=whole.num_experts, kv_size=kv_size)
        what = f"{new} new tokens, cached," if new else "prefill"
        name = f"{cluster} {what} K={top_k} kv/d={kv_size / sizes.hidden_size:g}"
        tokens = whole.tokens[:, : LENGTH // 2] if new else whole.tokens
        yield Instance(name, Workload(whole.ids[:, :, :top_k], tokens, whole.num_experts), sizes, new)


def kept(work: Workload, placement: Placement, group: int) -> float:
    """The share of transitions that stay on their device, or among `group` devices in a row."""
    place_LE = devices_of(placement) // group
    place = np.stack([place_E[work.routed[:, :, layer, 0]] for layer, place_E in enumerate(place_LE)])
    return float((place[1:] == place[:-1]).mean())


INFERENCE = Case(_prepare, _run, _told)
