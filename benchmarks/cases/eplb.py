"""EPLB's balance: raw, repaired and refined, over what bounds it; for steps; and seconds.

Loads of 58 layers of 256 experts are drawn log-normal, or as counts of 262,144 pairs with Zipf shares; experts of a
layer in random order.
"""

from collections.abc import Iterator
from functools import partial
from statistics import fmean

import numpy as np

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import eplb
from moeplan.solvers.balance import step_balance
from moeplan.solvers.placement import Placement

from ..race import Call, race
from ..study import Row, Settings, Study

Array = np.ndarray
LAYERS, EXPERTS, SLOTS, SEEDS = 58, 256, 288, 5
PAIRS = 2**18
DRAWS = [("log-normal", s) for s in (0.5, 1.0, 1.5, 2.0)] + [("Zipf", s) for s in (0.8, 1.0, 1.3)]
METHODS: tuple[eplb.Method, ...] = ("published", "refined")
Instance = tuple[Cluster, int | None, str, float]


def _loads(kind: str, spread: float, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    if kind == "log-normal":
        return rng.lognormal(0, spread, (LAYERS, EXPERTS))
    share = np.arange(1, EXPERTS + 1.0) ** -spread
    counts = [rng.permutation(rng.multinomial(PAIRS, share / share.sum())) for _ in range(LAYERS)]
    return np.array(counts, dtype=np.float64)


def _excess(instance: Instance) -> Iterator[Row]:
    cluster, num_groups, kind, spread = instance
    slots, name = SLOTS // cluster.num_devices, f"{kind} {spread:g} on {cluster}"
    draws = [_loads(kind, spread, seed) for seed in range(SEEDS)]
    solve = partial(eplb.solve, cluster=cluster, slots=slots, num_groups=num_groups)
    calls: dict[str, Call] = {method: partial(solve, draws[0], method=method) for method in METHODS}
    timings = race(calls, "published", rounds=5)
    outcomes = {method: [solve(loads, method=method).outcome for loads in draws] for method in METHODS}
    bounds = [outcome.bound or 1.0 for outcome in outcomes["refined"]]
    raws = [eplb.raw_balance(loads, cluster, slots=slots, num_groups=num_groups) for loads in draws]
    raw = fmean(one.balance / bound - 1 for one, bound in zip(raws, bounds, strict=True))
    yield Row(name, "raw", quality=raw, bound=0.0, more={"duplicates": fmean(one.duplicates for one in raws)})
    for method in METHODS:
        values = [outcome.objective.value for outcome in outcomes[method]]
        quality = fmean(value / bound - 1 for value, bound in zip(values, bounds, strict=True))
        yield Row(name, method, quality=quality, bound=0.0, **timings[method].figures)


def _bounded(settings: Settings) -> list[Instance]:
    devices = (32,) if settings.quick else (32, 72, 96, 144)
    return [(Cluster(1, each), None, *draw) for each in devices for draw in DRAWS]


def _grouped(settings: Settings) -> list[Instance]:
    nodes = (4,) if settings.quick else (2, 4, 8)
    return [(Cluster(each, 32 // each), 8, *draw) for each in nodes for draw in DRAWS]


def _steps(num_steps: int) -> Iterator[Row]:
    """Half of the steps are placed by, half are judged by."""
    rng, cluster = np.random.default_rng(0), Cluster(1, 32)
    steps = _topical(rng, 2 * num_steps)
    seen, unseen = steps[::2], steps[1::2]
    placed: dict[str, partial[Placement]] = {
        "published": partial(_placed, seen.mean(axis=0), cluster, method="published"),
        "refined, mean load": partial(_placed, seen.mean(axis=0), cluster),
        "refined, steps": partial(_placed, seen, cluster),
        "refined, p95": partial(_placed, seen, cluster, quantile=0.95),
    }
    for method, timing in race(placed, "published", rounds=3).items():
        more = {"p95": step_balance(unseen, timing.value, 0.95), "seen": step_balance(seen, timing.value)}
        value = step_balance(unseen, timing.value)
        yield Row(
            f"B={num_steps:,}",
            method,
            quality=value,
            bound=1.0,
            more=more,
            axis="steps B, 8 layers",
            size=num_steps,
            **timing.figures,
        )


def _placed(loads: Array, cluster: Cluster, **options: float | str) -> Placement:
    return eplb.solve(loads, cluster, slots=9, **options).placement  # type: ignore[arg-type]


def _topical(rng: np.random.Generator, num_steps: int, num_layers: int = 8) -> Array:
    """Counts of steps whose text mixes six topics, each with experts of its own."""
    common = rng.lognormal(0, 0.8, (num_layers, EXPERTS))
    topics = rng.lognormal(0, 0.8, (6, num_layers, EXPERTS))
    share = common * np.einsum("bt,tle->ble", rng.dirichlet(np.full(6, 0.5), num_steps), topics)
    return np.asarray(rng.poisson(32_768 * share / share.sum(axis=2, keepdims=True)), np.float64)


STUDIES = (
    Study(
        title="58 x 256 experts in 288 slots",
        quality="mean excess, %",
        baseline="published",
        note="How far the busiest device's load lies above the least that is possible. "
        "Mean over five seeds of max/mean device load over the larger of 1 and the best largest replica, minus 1;"
        " seconds of one, once compiled. `raw` puts experts on a device twice, which no engine may load; `published` is"
        " it repaired. On 72 devices and more the bound is weak.",
        instances=_bounded,
        rows=_excess,
    ),
    Study(
        title="The same in 8 groups that stay on nodes",
        quality="mean excess, %",
        baseline="published",
        note="The same excess where expert groups must stay on nodes. "
        "32 devices; the bound is that of the best way to deal the groups to nodes.",
        instances=_grouped,
        rows=_excess,
    ),
    Study(
        title="Steps: max/mean device load of those not seen",
        quality="max/mean",
        baseline="published",
        note="The busiest device's load over the mean, on steps that the placement has not seen. "
        "Synthetic: six topics that steps mix, 8 layers of 256 experts in 288 slots on 32 devices. Placed by every"
        " second step, judged by the others: the mean over layers and steps, and the 95th percentile of steps.",
        instances=lambda settings: [30, 100] if settings.quick else [30, 100, 300, 1000],
        rows=_steps,
    ),
)
