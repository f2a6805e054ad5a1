"""A plan's predictor, read with suspicion and fitted again: the naive twin of `planner.netmoe.predictor`.

Legend: I fitted samples; L MoE layers; E experts; D devices.
"""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError, InputError
from ...runtime.migrating.predictor import Predictor, read_predictor
from ...runtime.plan import Plan
from .census import Census, Sent
from .certificate import Certificate
from .policy_structure import decision_of

__all__ = ["predictors_of"]

RIDGE = 0.03
CLOSE = 1e-4  # relative to the largest: two ways to the same least squares, in float32


def predictors_of(
    plan: Plan, census: Census, folder: Path, certificate: Certificate
) -> dict[str, NDArray[np.float32] | None]:
    """By placement: the plan's from its file, held against a fit; contiguous' from the fit."""
    named = decision_of(plan).predictor
    if named is None:
        return {"plan": None, "contiguous": None}
    contents = read_predictor(folder / named.file)
    if hashlib.sha256(contents).hexdigest() != named.sha256:
        raise CertificationError(f"{folder / named.file}: another predictor than the plan's; re-run moeplan solve")
    try:
        per_pair = _check(contents, plan, census.sent["plan"], census)
    except InputError as error:
        raise CertificationError(f"{folder / named.file}: {error}") from error
    certificate.checks.append("predictor")
    return {"plan": per_pair, "contiguous": _fitted_again(plan, census.sent["contiguous"], census)}


def _check(contents: bytes, plan: Plan, sent: Sent, census: Census) -> NDArray[np.float32]:
    """The predictor in a file, `[L-1, E, D]`, refused where the fitted samples give another one."""
    model = plan.model
    shape = (model.num_layers - 1, model.num_experts, plan.cluster.num_devices)
    claimed, found = Predictor.from_bytes(contents, shape).per_pair, _fitted_again(plan, sent, census)
    off = np.abs(claimed - found).max(initial=0.0) / max(float(np.abs(found).max(initial=0.0)), 1e-9)
    if off > CLOSE:
        raise CertificationError(
            f"predictor off by {off:.2g} from what the fitted samples give; it was fitted on others. Re-run solve"
        )
    return claimed


def _fitted_again(plan: Plan, sent: Sent, census: Census) -> NDArray[np.float32]:
    """The same fit by the least squares of an augmented system, `[L-1, E, D]`."""
    who, maps = census.fitted, []
    for layer in range(plan.model.num_layers - 1):
        pairs, following = census.experts[who, layer].astype(float), sent.copies[who, layer + 1].astype(float)
        met = pairs.sum(axis=0)
        prior = np.repeat(following.sum(axis=0)[None] / max(met.sum(), 1.0), len(met), axis=0)
        if census.by_tokens:
            for expert in np.flatnonzero(met):
                prior[expert] = sent.linked[layer, expert] / (plan.model.top_k * met[expert])
        weight = 1 / np.sqrt(np.maximum(pairs.sum(axis=1), 1.0))
        rows, goal = pairs * weight[:, None], (following - pairs @ prior) * weight[:, None]
        ridge = np.sqrt(RIDGE * max((rows**2).sum(), 1e-9) / len(met))
        stacked = np.vstack([rows, ridge * np.eye(len(met))])
        aims = np.vstack([goal, np.zeros((len(met), goal.shape[1]))])
        maps.append(prior + np.linalg.lstsq(stacked, aims, rcond=None)[0])
    shape = (plan.model.num_layers - 1, plan.model.num_experts, plan.cluster.num_devices)
    return np.array(maps).reshape(shape).astype(np.float32)
