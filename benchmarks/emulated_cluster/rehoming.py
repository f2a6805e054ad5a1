"""NetMoE in training: samples that go where their experts are, beside samples that stay, forward and backward."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from .case import Case, Figure, Measured
from .model import EmulatedModel, Sizes, train
from .prediction import Predictor
from .routing import Workload, plan_of, preferring
from .timing import Seconds, interleaved, ratio

METHOD = "sum"
LAYERS, LENGTH = 6, 16
EXPERTS_A_DEVICE, SAMPLES = 8, 16  # a rank: on two, the experts and samples of a node of the paper's
BATCHES = 9  # steps, one a round: what re-homing gains differs from one to the next
SEED = 12


@dataclass(frozen=True, slots=True)
class Locality:
    """Steps of samples whose preferences last so many layers; all route by one table."""

    name: str
    lasting: int
    steps: list[Workload]
    sizes: Sizes

    def of_round(self, number: int) -> Workload:
        """The step of a round; the first is taken by the call that is not timed."""
        return self.steps[(number + 1) % BATCHES]


def _prepare(cluster: Cluster) -> list[Locality]:
    shape, num_experts = (BATCHES * SAMPLES * cluster.num_devices, LENGTH), EXPERTS_A_DEVICE * cluster.num_devices
    found = []
    for name, lasting in (("persistent", LAYERS), ("independent", 1)):
        all_steps = preferring(np.random.default_rng(SEED), shape, LAYERS, num_experts, lasting)
        steps = [replace(all_steps, tokens=tokens) for tokens in np.split(all_steps.tokens, BATCHES)]
        found.append(Locality(f"{cluster} K=2, {name} preferences", lasting, steps, Sizes(num_experts=num_experts)))
    return found


def _ways(cluster: Cluster, one: Locality) -> dict[str, Plan]:
    work = one.steps[0]
    placement = contiguous.solve(LAYERS, work.num_experts, cluster).placement
    policy = SamplePolicyDecision(method=METHOD, layers=tuple(range(LAYERS)))
    return {
        "samples stay": plan_of(cluster, work, one.sizes, placement),
        f"netmoe ({METHOD})": plan_of(cluster, work, one.sizes, placement, sample_policy=policy),
    }


def _run(cluster: Cluster, rank: int, _profile: Profile, given: list[Locality], rounds: int) -> Measured:
    found: dict[str, Seconds] = {}
    for one in given:
        calls = {}
        for way, plan in _ways(cluster, one).items():
            model = parallelize(EmulatedModel(one.steps[0].ids, one.sizes), plan)
            calls[f"{one.name}/{way}"] = partial(_train_next, model, itertools.cycle(inputs(cluster, rank, one)))
        found |= interleaved(calls, rounds)
    return found


def inputs(cluster: Cluster, rank: int, one: Locality) -> list[tuple[Tensor, Tensor]]:
    """The tokens and the sample ids of a rank, a step each."""
    tokens = [torch.as_tensor(step.of_rank(rank, cluster.num_devices)) for step in one.steps]
    return [(mine, torch.arange(len(mine)) + rank * len(mine)) for mine in tokens]


def _train_next(model: nn.Module, steps: Iterator[tuple[Tensor, Tensor]]) -> None:
    train(model, *next(steps))


def _told(cluster: Cluster, profile: Profile, given: list[Locality], measured: Measured) -> list[Figure]:
    figures = []
    for one in given:
        ways = list(_ways(cluster, one))
        found = [measured[f"{one.name}/{way}"] for way in ways]
        steps = [one.of_round(number) for number in range(len(found[0].samples))]
        placement = contiguous.solve(LAYERS, steps[0].num_experts, cluster).placement
        predictors = [Predictor.of(profile, cluster, step, one.sizes, placement) for step in steps]
        stay_s = np.median([predictor.standard(backward=True) for predictor in predictors])
        go_s = np.median([predictor.migrating(METHOD, backward=True) for predictor in predictors])
        axis = f"NetMoE {cluster}: layers that preferences last"
        told = [{}, left(predictors)]
        for way, seconds, predicted_s, more in zip(ways, found, (stay_s, go_s), told, strict=True):
            faster = ratio(found[0], seconds)
            figures.append(
                Figure(one.name, way, seconds, float(predicted_s), faster, more, axis=axis, size=one.lasting)
            )
    return figures


def left(steps: list[Predictor]) -> dict[str, float]:
    """What samples that go leave of what those send that stay; medians of steps.

    Bytes: through the busiest node of each exchange. Pairs of tokens and experts: as in the paper's Table 5.
    """
    found = []
    for step in steps:
        stay, go = [step.home] * (LAYERS + 1), step.homes(METHOD)
        found.append((step.busiest(go) / step.busiest(stay), step.combined(go) / step.combined(stay)))
    bytes_left, pairs_left = np.median(found, axis=0)
    return {"bytes of the busiest node, %": bytes_left, "pairs combined between nodes, %": pairs_left}


REHOMING = Case(_prepare, _run, _told)
