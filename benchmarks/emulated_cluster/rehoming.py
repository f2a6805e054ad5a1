"""NetMoE in training: samples that go where their experts are, beside samples that stay, forward and backward."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from moeplan.profilers.cluster import Cluster
from moeplan.runtime import parallelize
from moeplan.runtime.decisions import SamplePolicyDecision
from moeplan.runtime.plan import Plan
from moeplan.solvers import contiguous

from .calibration import Profile
from .case import Case, Measured
from .figures import Figure
from .model import EmulatedModel, Sizes
from .prediction import Predictor
from .routing import Workload, plan_of, preferring
from .timing import Seconds, interleaved, ratio

METHOD = "sum"
LAYERS, EXPERTS_A_DEVICE, SAMPLES, LENGTH = 6, 2, 4, 16  # samples a rank, as in the paper
SEED = 12


@dataclass(frozen=True, slots=True)
class Locality:
    """A step of samples whose preferences last so many layers."""

    name: str
    lasting: int
    work: Workload
    sizes: Sizes


def _prepare(cluster: Cluster) -> list[Locality]:
    shape, num_experts = (SAMPLES * cluster.num_devices, LENGTH), EXPERTS_A_DEVICE * cluster.num_devices
    found = []
    for name, lasting in (("persistent", LAYERS), ("independent", 1)):
        work = preferring(np.random.default_rng(SEED), shape, LAYERS, num_experts, lasting)
        found.append(Locality(f"{cluster} K=2, {name} preferences", lasting, work, Sizes(num_experts=num_experts)))
    return found


def _ways(cluster: Cluster, one: Locality) -> dict[str, Plan]:
    placement = contiguous.solve(LAYERS, one.work.num_experts, cluster).placement
    policy = SamplePolicyDecision(method=METHOD, layers=tuple(range(LAYERS)))
    return {
        "samples stay": plan_of(cluster, one.work, one.sizes, placement),
        f"netmoe ({METHOD})": plan_of(cluster, one.work, one.sizes, placement, sample_policy=policy),
    }


def _run(cluster: Cluster, rank: int, _profile: Profile, given: list[Locality], rounds: int) -> Measured:
    found: dict[str, Seconds] = {}
    for one in given:
        tokens = torch.as_tensor(one.work.of_rank(rank, cluster.num_devices))
        samples = torch.arange(len(tokens)) + rank * len(tokens)
        calls = {}
        for way, plan in _ways(cluster, one).items():
            model = parallelize(EmulatedModel(one.work.ids, one.sizes), plan)
            calls[f"{one.name}/{way}"] = partial(_train, model, tokens, samples)
        found |= interleaved(calls, rounds)
    return found


def _train(model: nn.Module, tokens: Tensor, samples: Tensor) -> None:
    model(tokens, samples).sum().backward()


def _told(cluster: Cluster, profile: Profile, given: list[Locality], measured: Measured) -> list[Figure]:
    figures = []
    for one in given:
        placement = contiguous.solve(LAYERS, one.work.num_experts, cluster).placement
        predicted = Predictor.of(profile, cluster, one.work, one.sizes, placement)
        stay_s, go_s = predicted.standard(backward=True), predicted.migrating(METHOD, backward=True)
        axis, ways = f"NetMoE {cluster}: layers that preferences last", _ways(cluster, one)
        found = [measured[f"{one.name}/{way}"] for way in ways]
        for way, seconds, predicted_s in zip(ways, found, (stay_s, go_s), strict=True):
            faster = ratio(found[0], seconds)
            figures.append(Figure(one.name, way, seconds, predicted_s, faster, axis=axis, size=one.lasting))
    return figures


REHOMING = Case(_prepare, _run, _told)
