"""Running the embedded model on real processes under plans, and holding it against the single process.

Legend: B a rank's samples; I samples; S positions; V vocabulary; L MoE layers; T tokens; K experts a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ...profilers.world import World, run_world
from ...runtime import parallelize
from ...runtime.decisions import DispatchModel
from ...runtime.engine.stopwatch import Laps, stopwatch
from ...runtime.engine.traffic import Traffic
from ...runtime.expert_parallel import ExpertParallelModel
from ...runtime.plan import Plan
from .model import load_embedded

TIMEOUT_S = 120.0
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan to run under a dispatch model, by the name it has on the screen."""

    name: str
    dispatch_model: DispatchModel
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of one run, over all ranks."""

    name: str
    dispatch_model: DispatchModel
    largest_difference: float  #: Between any logit and the single process's
    misrouted: int  #: Choices that differ from those of the single process, of all tokens, layers and K
    copies: float  #: Copies that crossed devices, a token and layer
    #: payload_bytes, kv_bytes, return_bytes: bytes that crossed devices in the whole run: hidden vectors, K and V, and
    #: tokens going home after the last layer of a coherent forward
    payload_bytes: int
    kv_bytes: int
    return_bytes: int
    balance: float  #: Token-expert pairs of the busiest device over the mean, mean over layers
    #: exchange_s, experts_s: seconds of a forward's dispatches and combines of hidden vectors, and of its experts: the
    #: slowest rank of each layer, the median over `REPEATS` forwards, summed over layers
    exchange_s: float
    experts_s: float


@dataclass(frozen=True, slots=True)
class _Job:
    """Input of every rank: the trials, the text int64 `[I, S]`, and its routing in one process `[I * S, L, K]`."""

    trials: tuple[Trial, ...]
    tokens: NDArray[np.int64]
    ids: NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class _Share:
    """Measurements of one trial on one rank, with one entry of `laps` per repeat."""

    largest_difference: float
    misrouted: int
    traffic: Traffic
    laps: list[Laps]


def run_trials(trials: Sequence[Trial], tokens_IS: NDArray[np.int64], ids_TLK: NDArray[np.uint16]) -> list[Measured]:
    """Run every trial on one process a device, with sample i on rank i mod D.

    Parameters
    ----------
    tokens_IS
        The samples; each rank holds its logits against its own single-process run.
    ids_TLK
        The experts of every token as a single process chose them.

    Raises
    ------
    RankError
        A rank died or hung.
    """
    num_ranks = trials[0].plan.cluster.num_devices
    shares = run_world(num_ranks, _run_rank, _Job(tuple(trials), tokens_IS, ids_TLK), timeout_s=TIMEOUT_S)
    assert shares is not None  # the demo starts its own ranks
    return [_measured(trial, [rank[i] for rank in shares], tokens_IS.size) for i, trial in enumerate(trials)]


def _run_rank(world: World, job: _Job) -> list[_Share]:
    sample_B = torch.arange(world.rank, len(job.tokens), world.size)
    tokens_BS = torch.from_numpy(job.tokens)[sample_B]
    shares = []
    with torch.inference_mode():
        expected_BSV = load_embedded()(tokens_BS)
        for trial in job.trials:
            model = parallelize(load_embedded(), trial.plan, dispatch=trial.dispatch_model)
            difference_BSV = (model(tokens_BS, sample_B) - expected_BSV).abs()
            largest = float(difference_BSV.max()) if difference_BSV.numel() else 0.0
            misrouted = 0
            for layer, routed in enumerate(model.routed):
                token_T = (routed.sample * job.tokens.shape[1] + routed.position).numpy()
                misrouted += int((routed.ids.numpy() != job.ids[token_T, layer]).sum())
            shares.append(_Share(largest, misrouted, model.traffic, _timed(model, tokens_BS, sample_B)))
            world.report(trial.name)
    return shares


def _timed(model: ExpertParallelModel, tokens_BS: torch.Tensor, sample_B: torch.Tensor) -> list[Laps]:
    timed = []
    for _ in range(REPEATS):
        with stopwatch() as laps:
            model(tokens_BS, sample_B)
        timed.append(laps)
    return timed


def _measured(trial: Trial, shares: list[_Share], num_tokens: int) -> Measured:
    loads_DL = np.array([share.traffic.loads for share in shares], dtype=np.float64)
    copies = sum(share.traffic.copies for share in shares)
    return Measured(
        name=trial.name,
        dispatch_model=trial.dispatch_model,
        largest_difference=max(share.largest_difference for share in shares),
        misrouted=sum(share.misrouted for share in shares),
        copies=copies / (num_tokens * trial.plan.model.num_layers),
        payload_bytes=sum(share.traffic.payload_bytes for share in shares),
        kv_bytes=sum(share.traffic.kv_bytes for share in shares),
        return_bytes=sum(share.traffic.return_bytes for share in shares),
        balance=float((loads_DL.max(axis=0) / loads_DL.mean(axis=0)).mean()),
        exchange_s=_seconds(shares, "dispatch") + _seconds(shares, "combine"),
        experts_s=_seconds(shares, "experts"),
    )


def _seconds(shares: list[_Share], part: Literal["dispatch", "experts", "combine"]) -> float:
    laps_DRL = np.array([[laps[part] for laps in share.laps] for share in shares])
    return float(np.median(laps_DRL.max(axis=0), axis=0).sum())
