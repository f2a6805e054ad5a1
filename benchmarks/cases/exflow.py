"""ExFlow placements: held-out quality on real routing, and how quality and seconds grow with L, E and D.

Every placement stands beside the chain of assignments alone (one start, no sweeps), solved in the same run.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import exflow
from moeplan.solvers.bounds import kept_bound
from moeplan.solvers.cost import hops_kept
from moeplan.solvers.exflow.budget import Budget
from moeplan.solvers.exflow.chain import chain
from moeplan.solvers.exflow.programme import Programme
from moeplan.solvers.outcome import Status
from moeplan.solvers.result import PlacementResult
from moeplan.traces.split import fitted

from ..race import cpu_s, peak_bytes, race
from ..study import Row, Settings, Study

Array = np.ndarray
ROUTING = "gpt-oss-20b/routing.npz"
DEVICES = (4, 8, 16, 32)
SEEDS = 3
MEANS = ("quality", "bound", "seconds", "least_s", "ratio")
GROWTH = (
    *(("layers L (E = 32, D = 8)", layers, (layers, 32, 8)) for layers in (3, 6, 12, 24)),
    *(("experts E (L = 6, D = 8)", experts, (6, experts, 8)) for experts in (16, 32, 64, 128)),
    *(("devices D (L = 6, E = 64)", devices, (6, 64, devices)) for devices in (4, 8, 16, 32)),
)


def _splits(settings: Settings) -> list[tuple[int, Callable[[], list[tuple[Array, Array]]]]]:
    read = partial(_read, settings.data / ROUTING, 1 if settings.quick else SEEDS)
    return [(devices, read) for devices in DEVICES[2 if settings.quick else 0 :]]


def _real(instance: tuple[int, Callable[[], list[tuple[Array, Array]]]]) -> Iterator[Row]:
    """Means over the splits."""
    num_devices, splits = instance
    runs = [_both(fit, unseen, num_devices, seed) for seed, (fit, unseen) in enumerate(splits())]
    for method, first in runs[0].items():
        rows = [run[method] for run in runs]
        mean: dict[str, Any] = {name: fmean(getattr(row, name) for row in rows) for name in MEANS}
        more = {"fitted, %": fmean(row.more["fitted, %"] for row in rows)}
        yield replace(first, instance=f"gpt-oss-20b D={num_devices}", more=more, **mean)


def _growth(instance: tuple[str, int, tuple[int, int, int]]) -> Iterator[Row]:
    axis, size, (num_layers, num_experts, num_devices) = instance
    weights = _markov(np.random.default_rng(0), num_layers, num_experts)
    for method, row in _both(weights, weights, num_devices, 0).items():
        memory = row.memory_bytes or peak_bytes(lambda: _sweeps(weights, num_devices, 0))
        name = f"L={num_layers} E={num_experts} D={num_devices}"
        yield replace(row, instance=name, method=method, memory_bytes=memory, more={}, axis=axis, size=size)


def _both(fit: Array, unseen: Array, num_devices: int, seed: int) -> dict[str, Row]:
    """Sweeps and chain, fitted on `fit`; the share kept of `unseen`."""
    bound = float(kept_bound(fit, np.full(num_devices, fit.shape[1] // num_devices)).value / fit.sum())
    start = race({"chain": lambda: _chain(fit, num_devices, seed)}, "chain", budget_s=0.1)["chain"]
    started = cpu_s()
    found = _sweeps(fit, num_devices, seed)
    seconds = cpu_s() - started
    chained = [float(w[start.value].sum() / w.sum()) for w in (unseen, fit)]
    kept = [float(hops_kept(w, found.placement, num_devices).device.sum() / w.sum()) for w in (unseen, fit)]
    times = {"seconds": seconds, "least_s": seconds, "ratio": start.seconds / seconds}
    return {
        "chain": Row("", "chain", quality=chained[0], bound=bound, more={"fitted, %": chained[1]}, **start.figures),
        "sweeps": Row("", "sweeps", quality=kept[0], bound=bound, more={"fitted, %": kept[1]}, **times),  # type: ignore[arg-type]
    }


def _sweeps(fit: Array, num_devices: int, seed: int) -> PlacementResult:
    found = exflow.solve(fit, Cluster(1, num_devices), seed=seed, method="sweeps")
    if found.outcome.status is Status.INTERRUPTED:
        raise KeyboardInterrupt
    return found


def _chain(fit: Array, num_devices: int, seed: int) -> Array:
    """Which pairs of experts of consecutive layers share a device, bool `[L-1, E, E]`."""
    sizes, slots = (fit.shape[1],) * (len(fit) + 1), np.full(num_devices, fit.shape[1] // num_devices)
    programme = Programme(list(fit), sizes, slots, np.eye(num_devices), num_devices)
    layout = chain(programme, 0, Budget(0, 60), np.random.default_rng(seed))
    return np.array([here[:, None] == there for here, there in itertools.pairwise(layout)])


def _read(routing: Path, seeds: int) -> list[tuple[Array, Array]]:
    """Top-1 transitions of both halves of the samples, a pair a split."""
    with np.load(routing) as data:
        ids, sample = data["expert_ids"][:, :, 0].astype(np.int64), data["seq_id"].astype(np.int64)
        num_experts = int(data["num_experts"])
    samples, of_sample = np.unique(sample, return_inverse=True)
    halves = [fitted(samples, seed=seed, fraction=0.5)[of_sample] for seed in range(seeds)]
    return [(_transitions(ids[half], num_experts), _transitions(ids[~half], num_experts)) for half in halves]


def _transitions(ids: Array, num_experts: int) -> Array:
    pairs = (ids[:, :-1] * num_experts + ids[:, 1:]).T
    counts = [np.bincount(pair, minlength=num_experts**2) for pair in pairs]
    return np.array(counts, dtype=float).reshape(-1, num_experts, num_experts)


def _markov(rng: np.random.Generator, num_layers: int, num_experts: int) -> Array:
    weights = rng.dirichlet(np.full(num_experts, 0.08), (num_layers - 1, num_experts))
    for _ in range(50):
        weights /= weights.sum(axis=1, keepdims=True)
        weights /= weights.sum(axis=2, keepdims=True)
    return weights


STUDIES = (
    Study(
        title="Real routing",
        quality="top-1 hops kept on unseen samples, %",
        baseline="chain",
        note=f"Means over {SEEDS} hash splits in half. The bound is the fitted half's, `fitted` what is kept there;"
        " unseen samples have no proven bound.",
        needs=ROUTING,
        instances=_splits,
        rows=_real,
    ),
    Study(
        title="Growth with layers, experts and devices",
        quality="hops kept, %",
        baseline="chain",
        note="Balanced Markov transitions, rows Dirichlet(0.08). One solve each. Sweeps search until a budget of work"
        " is spent, so that their seconds are that budget's, not the problem's.",
        instances=lambda settings: GROWTH[:: 4 if settings.quick else 1],
        rows=_growth,
    ),
)
