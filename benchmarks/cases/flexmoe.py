"""FlexMoE beside today's placement, static replicas, EPLB every 100 steps and the paper: a whole run, replayed.

Records are 10 iterations apart; decisions see the past only, and what moves is charged in full. Rates: an H100's
matrix products at 650 TFLOP/s, measured exchanges of one node; 45 GB/s between nodes, which is assumed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moeplan.profilers.cluster import Cluster, Link
from moeplan.solvers import contiguous, eplb
from moeplan.solvers.flexmoe import Costs, Decide, EveryEplb, Paper, Policy, Run, Split, Stay, follow, initial
from moeplan.solvers.flexmoe.initial import BALANCE_ALONE

from ..routing import SMARTMOE
from ..study import Row, Settings, Study

Array = np.ndarray
STEPS = 10  # that a record stands for
EARLY = 10  # records that `later` leaves out: 100 iterations
QUICK_RECORDS = 60
PARTS = ("experts, s", "exchanges, s", "sums, s", "moves, s")


def _costs(hidden: int, parameters: int) -> Costs:
    """Rates of experts of so many parameters; owners alone keep their states."""
    return Costs.of(
        parameters=parameters,
        hidden=hidden,
        pair_s=3 * 2 * parameters / 650e12,
        intra=Link(10e-6, 1 / 300e9),
        inter=Link(20e-6, 1 / 45e9),
        intra_sum=Link(0.0, 1 / 350e9),
        inter_sum=Link(0.0, 1 / 45e9),
    )


OWNERS = _costs(1024, 2 * 1024 * 4096)
COSTS = OWNERS._replace(replicas_free=False)
DRIFTING = ((64, 3), (128, 4), (256, 5), (256, 6))  # experts, slots of each of 64 devices
EVEN = (("even", 1, True), ("even, 8 records", 8, True))  # records planned for, and whether replicas share evenly
PAIRS, RECORDS = 8192, 60
TOKENS, RECORDED = (8, 32, 128, 512, 2048), 2048  # of a rank in a micro-batch, and those of the recording
SIZES = {  # of an expert: hidden, inner, matrices
    "1024 x 4096 (recorded)": (1024, 4096, 2),
    "7168 x 2048 (DeepSeek-V3)": (7168, 2048, 3),
    "4096 x 14336 (Mixtral)": (4096, 14336, 3),
}
FITTED, JUDGED = 250, 100  # records: by the last of these the replicas are placed, and those that follow
FAR_S = COSTS.moved_bytes * COSTS.inter_sum_s_per_byte  # of an expert that another node sends
EVEN_S = COSTS.pair_s * PAIRS  # of a device's experts under even loads
DRIFT, KEPT = 0.078, 0.87  # shares change by 3 % in 10 iterations, by 7 % in 100 (total variation)


@dataclass(frozen=True, slots=True)
class Contender:
    """A rule with the split that it is run with."""

    name: str
    decide: Decide
    split: Split = "quota"
    costs: Costs = COSTS


BALANCE = Contender("flexmoe, balance alone", Policy(every=0, evaluations=0))
FREE = Contender("flexmoe, balance alone, owners", BALANCE.decide, costs=OWNERS)
EPLB = Contender("EPLB every 100, even", EveryEplb(10), "even")
MATCHED = Contender("EPLB every 100, matched, exact", EveryEplb(10, matched=True))
CONTENDERS = (
    Contender("static replicas, even", Stay(), "even"),
    EPLB,
    Contender("paper", Paper(), "capacity"),
    BALANCE,
    Contender("flexmoe", Policy()),
)
IN_FOUR_SLOTS = (
    MATCHED,
    Contender("paper, all shrink", Paper(all_shrink=True), "capacity"),
    Contender("flexmoe, owners", Policy(), costs=OWNERS),
    Contender("flexmoe, owners, 8 records", Policy(window=8), costs=OWNERS),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Recorded counts on a cluster, in so many slots."""

    data: Path
    cluster: Cluster
    slots: int
    every: int = 1  #: Of the recorded layers
    records: int | None = None

    def counts(self) -> Array:
        """Pairs by record, layer, micro-batch, expert and source, `[R, L, M, E, D]`."""
        with np.load(self.data / SMARTMOE) as arrays:
            counts = arrays["counts"][: self.records, :, :: self.every]
        return np.ascontiguousarray(counts.transpose(0, 2, 3, 4, 1)).astype(np.int64)


def _rows(case: Case) -> Iterator[Row]:
    counts, name = case.counts(), f"{case.cluster}, {case.slots} slots"
    if case.slots == 3:
        run = _run(counts, Contender("", Stay(), "even"), case.cluster, counts.shape[3] // case.cluster.num_devices)
        yield _row(f"{case.cluster}, 2 slots", "today", run)
    for contender in (*CONTENDERS, *(IN_FOUR_SLOTS if case.slots == 4 else ())):
        yield _row(name, contender.name, _run(counts, contender, case.cluster, case.slots))


def _run(counts: Array, contender: Contender, cluster: Cluster, slots: int) -> Run:
    placed = contiguous.solve(counts.shape[1], counts.shape[3], cluster, slots=slots).placement
    start = placed.physical_to_logical.astype(np.int64).reshape(counts.shape[1], cluster.num_devices, slots)
    group = cluster.devices_per_node
    return follow(counts, start, contender.decide, contender.costs, group=group, steps=STEPS, split=contender.split)


def _row(instance: str, method: str, run: Run) -> Row:
    parts = dict(zip(PARTS, run.seconds.mean(axis=(0, 1)), strict=True))
    unpaid = sum(change.saved_s * change.records * STEPS < change.price_s for change in run.changes)
    more = {
        "balance": float(run.balance.mean()),
        "balance after iteration 100": float(run.balance[EARLY:].mean()),
        **{part: float(value) for part, value in parts.items()},
        "experts moved": float(run.moved),
        "moved, TB": run.moved_bytes / 1e12,
        "changes": float(len(run.changes)),
        "violations": float(run.violations(Policy().horizon)),
        "unpaid in hindsight": float(unpaid),
    }
    return Row(instance, method, quality=run.step_s, seconds=run.planning_s, more=more)


def _sparse(settings: Settings) -> Iterator[tuple[Case, int, str]]:
    """Cases of few tokens per rank and of many, with small experts and large ones, in 4 slots."""
    for cluster in (Cluster(1, 16), Cluster(4, 4)):
        case = Case(settings.data, cluster, 4, 12 if settings.quick else 6)
        yield from ((case, tokens, size) for size in SIZES for tokens in TOKENS[: 1 if settings.quick else None])


def _sparse_rows(instance: tuple[Case, int, str]) -> Iterator[Row]:
    """Today, replicas that stay and replicas that follow the load, all from placements for the same records."""
    case, tokens, size = instance
    hidden, inner, matrices = SIZES[size]
    costs = _costs(hidden, matrices * hidden * inner)
    counts = np.random.default_rng(0).binomial(case.counts(), tokens / RECORDED)
    layers, experts, group = counts.shape[1], counts.shape[3], case.cluster.devices_per_node
    in_order = contiguous.solve(layers, experts, case.cluster, slots=experts // case.cluster.num_devices).placement
    today = in_order.physical_to_logical.astype(np.int64).reshape(layers, case.cluster.num_devices, -1)
    start = initial(counts[FITTED - 8 : FITTED], case.slots, costs, group=group)
    rules: dict[str, tuple[Array, Decide]] = {
        "today": (today, Stay()),
        "static replicas": (start, Stay()),
        "flexmoe": (start, Policy()),
    }
    usual = 0.0
    for method, (table, decide) in rules.items():
        run = follow(counts[FITTED:][:JUDGED], table, decide, costs, group=group, steps=STEPS)
        row = _row(f"{case.cluster}, {size}, {tokens:,} tokens", method, run)
        usual = usual or run.step_s
        used = float((run.tables >= 0).sum(axis=(2, 3)).mean())
        more = {"of today, %": run.step_s / usual, "slots in use": used}
        yield replace(row, more=more | {key: row.more[key] for key in ("balance", *PARTS)})


def _lags(settings: Settings) -> Iterator[Case]:
    cases = (case for case in _cases(settings) if case.cluster.num_nodes == 1 and case.slots < 8)
    return cases if settings.quick else (replace(case, every=1) for case in cases)


def _cases(settings: Settings) -> Iterator[Case]:
    every, records = (12, QUICK_RECORDS) if settings.quick else (1 if settings.full else 3, None)
    for cluster in (Cluster(1, 16), Cluster(4, 4)):
        for slots in (3, 4, 8):
            yield Case(settings.data, cluster, slots, every, records)


def _lags_rows(case: Case) -> Iterator[Row]:
    """Balance so many iterations after the records that initial placements are made for."""
    counts = case.counts()
    judged = range(100, 481, 20) if len(counts) > 490 else range(20, len(counts) - 10, 20)
    for name, width, split in (("exact", 8, False), *(EVEN if case.slots == 4 else ())):
        found = []
        for record in judged:
            window = counts[record - width + 1 : record + 1]
            if split:
                start = _even(window, case.cluster, case.slots)
            else:
                start = initial(window, case.slots, COSTS, group=case.cluster.devices_per_node, policy=BALANCE_ALONE)
            later = [counts[[record + lag]].sum(axis=2, keepdims=True) for lag in (0, 1, 10)]
            rule: Split = "even" if split else "quota"
            runs = [follow(one, start, Stay(), COSTS, group=case.cluster.num_devices, split=rule) for one in later]
            found.append([float(run.balance.mean()) for run in runs])
        same, ten, hundred = np.mean(found, axis=0)
        more = {"10 iterations later": float(ten), "100 iterations later": float(hundred)}
        yield Row(f"{case.cluster}, {case.slots} slots", name, quality=float(same), bound=1.0, more=more)


def _even(window: Array, cluster: Cluster, slots: int) -> Array:
    """EPLB's placements for steps, `[L, D, S]`, whose replicas share evenly."""
    loads = window.sum(axis=(2, 4)).astype(np.float64)
    one = Cluster(1, cluster.num_devices)
    placed = eplb.solve(loads, one, slots=slots).placement
    return placed.physical_to_logical.astype(np.int64).reshape(loads.shape[1], cluster.num_devices, slots)


def drifting(num_experts: int, seed: int) -> Array:
    """Counts `[R, 1, 1, E, 64]` of Zipf's shares, whose logarithms drift: a first-order autoregression."""
    rng = np.random.default_rng(seed)
    base = np.log(rng.permutation(1 / np.arange(1, num_experts + 1) ** 1.26))
    drift = np.zeros(num_experts)
    counts = np.empty((RECORDS, 1, 1, num_experts, 64), np.int64)
    for record in counts:
        share = np.exp(base + drift)
        record[0, 0] = rng.multinomial(PAIRS, share / share.sum(), size=64).T
        drift = KEPT * drift + rng.normal(0, DRIFT, num_experts)
    return counts


def _drifting(instance: tuple[int, int, int]) -> Iterator[Row]:
    """The mean over seeds of every contender; quality is the balance after iteration 100."""
    num_experts, slots, seeds = instance
    for contender in (EPLB, MATCHED, BALANCE, FREE):
        runs = [_run(drifting(num_experts, seed), contender, Cluster(8, 8), slots) for seed in range(seeds)]
        rows = [_row("", "", run) for run in runs]
        more = {key: float(np.mean([row.more[key] for row in rows])) for key in rows[0].more}
        step_s, planning_s = (float(np.mean([getattr(run, key) for run in runs])) for key in ("step_s", "planning_s"))
        later, name = more.pop("balance after iteration 100"), f"{num_experts} experts, {slots} slots"
        yield Row(name, contender.name, quality=later, bound=1.0, seconds=planning_s, more={"step, s": step_s} | more)


def _sizes(settings: Settings) -> list[tuple[int, int, int]]:
    return [(*size, 1 if settings.quick else 3) for size in DRIFTING]


STUDIES = (
    Study(
        title="A training run",
        quality="layer and iteration, s",
        instances=_cases,
        rows=_rows,
        needs=SMARTMOE,
        note="Predicted seconds per layer and iteration over 5,010 iterations of SmartMoE's training, moves charged."
        " Every third of the recorded layers, with --full all of them. A record stands for 10 iterations, and what is"
        " decided after it holds from the next one on. Balance: max/mean of every micro-batch, mean; also without the"
        " first 100 iterations. Moved: experts of these layers, at 16 bytes a parameter; of owners, homes alone."
        " 8 records: a placement for the last four must be better over the last eight."
        " Violations: changes that cost more than they save within the horizon on the records that they were decided"
        " on; unpaid in hindsight: on those that followed. Seconds: planning, all layers and records; the first row of"
        " a kind compiles.",
    ),
    Study(
        title="Placements for a set of records, later",
        quality="busiest / mean",
        instances=_lags,
        rows=_lags_rows,
        needs=SMARTMOE,
        note="Max/mean of placements made for one or eight records: at the last of these, and later."
        " Mean over all recorded layers and records 100 to 480 by 20, micro-batches summed. Exact: `flexmoe.initial`"
        " for balance alone, under the exact split; even: EPLB refined, replicas sharing evenly.",
    ),
    Study(
        title="When it does not pay: few tokens per rank",
        quality="layer and iteration, s",
        instances=_sparse,
        rows=_sparse_rows,
        needs=SMARTMOE,
        note="Predicted seconds per layer and iteration from the middle of SmartMoE's training on, by tokens per rank"
        " and micro-batch, and by the size of an expert. Two recorded layers, 1,000 iterations of 4 micro-batches,"
        " 4 slots; fewer tokens than the 2,048 recorded are drawn from them. Replicas are placed by"
        " the eight records before, in as many of the slots as pay; static ones then stay. Owners alone keep states;"
        " sums are charged in full, once an iteration. The rate of 650 TFLOP/s is one of many tokens: with few, reading"
        " weights takes as long whatever the balance, and there is less to save than is said here.",
    ),
    Study(
        title="Synthetic drift on 64 devices in nodes of 8",
        quality="busiest / mean",
        instances=_sizes,
        rows=_drifting,
        note="Max/mean after iteration 100 of 600, from the contiguous placement; mean over 3 seeds."
        f" Shares are Zipf's with exponent 1.26, their logarithms drift so that shares change by 3 % in 10 and by 7 %"
        f" in 100 iterations; {PAIRS:,} pairs a device. Owners: homes alone move. Else every new replica brings its"
        f" state along: one from another node takes {1e3 * FAR_S:.1f} ms, as much as experts save within"
        f" {Policy().horizon:g} steps of which the busiest device has {100 * FAR_S / EVEN_S / Policy().horizon:.1f} %"
        " of the mean less.",
    ),
)
