"""A sample policy: its predictor, the methods tried, and what homes could save at most.

Legend: I fitted samples; L MoE layers; E experts; D devices.
"""

import itertools
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ....runtime.migrating.predictor import Predictor
from ....runtime.plan import Metric
from ....solvers import netmoe
from ....solvers.arrays import Bools, Floats, Ints
from ....solvers.placement import Placement
from ...evaluate.evaluate import Evaluated, evaluate, verdict
from ...evaluate.homes import Rehoming
from ...evaluate.journey import Contender, Journey
from ...evaluate.price import SOURCES
from ...evaluate.traffic import SampleTraffic
from ...task import Task
from .options import PLAN

# Simpler ways than a policy, where they are rivals of it, by the option that keeps the gain over the best of them.
SIMPLER = {
    "over_dealt": ("dealt/standard", "dealt by cost/standard"),
    "over_netmoe": ("netmoe sum/migrating", "netmoe even/migrating", "netmoe bottleneck/migrating"),
}
TRIED = ("sum", "even", "bottleneck")  # where exchanges are timed and no method is asked for
RIDGE = 0.03  # of the mean square of an expert's pairs


def fitted_predictor(task: Task, placement: Placement) -> Predictor:
    """The predictor of the fitted samples under a placement."""
    samples = task.scene.samples
    assert samples is not None
    traffic = samples.under(placement)  # which counts the experts, too
    assert samples.experts is not None
    return fit_predictor(samples.experts, traffic, task.fitted, task.model.top_k)


def tried(task: Task, predictor: Predictor | None) -> dict[str, float]:
    """Seconds of the timed parts of a fitted step under each method."""
    fitted = replace(task.scene, cohorts=task.scene.cohorts[:1])
    contenders = [
        Contender(method, Journey("migrating", task.placement, homes=Rehoming(method, predictor))) for method in TRIED
    ]
    part = evaluate(fitted, contenders, replay=task.replay).evaluation.fit
    return {
        one.name: sum(one.metrics[name].value for name in SOURCES if name in one.metrics) for one in part.contenders
    }


def over(metric: str, evaluated: Evaluated) -> dict[str, Metric | None]:
    """The least gain of the plan over the simpler ways of each kind that stand beside it; None where it is not known.

    By the options that keep it.
    """
    gains = dict[str, Metric | None]()
    for name, labels in SIMPLER.items():
        beside = [label for label in labels if label in evaluated.judged]
        if not beside:
            continue
        known = metric in evaluated.judged[PLAN].value
        differences = (verdict(evaluated, metric, against=label).gain for label in beside) if known else ()
        gains[name] = min(differences, key=lambda gain: gain.value, default=None)
    return gains


def locality(task: Task) -> netmoe.Locality:
    """Blind and least copies per fitted step, next layers known."""
    assert task.scene.samples is not None
    cluster, traffic, cohort = task.request.cluster, task.scene.samples.under(task.placement), task.scene.cohorts[0]
    here_D = np.arange(cluster.num_devices)
    blind = least = 0.0
    for at, layer in itertools.product(cohort.steps(), range(task.model.num_layers)):
        place, room_D = cohort.unit_ids[at], np.full(len(here_D), -(-len(at) // len(here_D)))
        following = traffic.following(layer, place)
        crossing = netmoe.traffic_of(traffic.copies[place, layer], here_D, cluster, next_counts=following)
        index = netmoe.locality(crossing, room_D, cluster)
        blind, least = blind + index.blind, least + max(index.least, 0.0)
    return netmoe.Locality(blind / cohort.num_steps, least / cohort.num_steps)


def fit_predictor(experts: NDArray[np.int32], traffic: SampleTraffic, fitted_I: Bools, top_k: int) -> Predictor:
    """Fit the predictor of samples with these pairs with experts `[I, L, E]` under a placement.

    Notes
    -----
    num(l) A(l -> l+1), where A[e, d] is the share of the tokens at expert e that visit device d next, over K because
    each of a token's K choices says so; it is then corrected by what it leaves of the fitted samples, by ridge
    regression towards no correction. With x_i, y_i a sample's pairs and next copies, over the root of its pairs,

        A + argmin_B sum_i |y_i - x_i (A + B)|^2 + lambda |B|^2,      lambda = RIDGE mean_e sum_i x_i[e]^2        (1)

    Where only counts are known nothing links two layers, and A is the same for all experts: the mean.
    """
    shape = (experts.shape[1] - 1, experts.shape[2], traffic.copies.shape[2])
    per_pair = np.zeros(shape, np.float32)
    for layer in range(shape[0]):
        pairs_IE = experts[fitted_I, layer].astype(np.float64)
        next_ID = traffic.copies[fitted_I, layer + 1].astype(np.float64)
        prior_ED = _prior(pairs_IE, next_ID, None if traffic.linked is None else traffic.linked[layer], top_k)
        scale_I1 = np.sqrt(np.maximum(pairs_IE.sum(axis=1, keepdims=True), 1))
        x_IE, y_ID = pairs_IE / scale_I1, next_ID / scale_I1
        gram_EE = x_IE.T @ x_IE
        ridge = RIDGE * max(float(np.trace(gram_EE)), 1e-9) / len(gram_EE)
        left_ED = x_IE.T @ (y_ID - x_IE @ prior_ED)
        per_pair[layer] = prior_ED + np.linalg.solve(gram_EE + ridge * np.eye(len(gram_EE)), left_ED)  # (1)
    return Predictor(per_pair)


def _prior(pairs_IE: Floats, next_ID: Floats, linked_ED: Ints | None, top_k: int) -> Floats:
    """A, `[E, D]`: by expert where tokens link the layers and the expert was met, else the mean of all."""
    mean_D = next_ID.sum(axis=0) / max(float(pairs_IE.sum()), 1.0)
    met_E1 = pairs_IE.sum(axis=0)[:, None]
    mean_ED = np.tile(mean_D, (len(met_E1), 1))
    if linked_ED is None:
        return mean_ED
    return np.asarray(np.divide(linked_ED, top_k * met_E1, out=mean_ED, where=met_E1 > 0))
