"""Placements that change between steps: what a rule does on the steps of a part of a trace, and what that sends.

Legend: B steps; L MoE layers; E experts; D devices, S slots of each; C link classes; R periods.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...runtime.decisions import RebalancingDecision
from ...runtime.engine.owners import owners_of
from ...runtime.rebalancing import policy_of, tables_of
from ...solvers.arrays import Floats, Ints
from ...solvers.placement import Placement
from ...traces.count_form import CountTrace
from ...traces.reader import Trace
from ...workers import Workers

if TYPE_CHECKING:
    from ...solvers.flexmoe import Costs, Decide, Run, Split
    from ...solvers.quota import Holders
    from .journey import Journey


def check_steps(source: Trace | CountTrace, num_ranks: int | None, num_devices: int, what: str) -> None:
    """Refuse a trace without steps in their order, or whose tokens are nowhere, with UsageError; `what` follows it."""
    if "step" not in source.known:
        raise UsageError(f"{source.path}: no steps were recorded; {what} follows them: record a training run")
    if source.meta.step_order == "unknown":
        raise UsageError(f"{source.path}: its steps came in no known order; {what} follows them: record them in order")
    if not isinstance(source, CountTrace) and "sample" not in source.known and num_ranks != num_devices:
        raise UsageError(
            f"{source.path}: no samples, and {num_ranks or 'no'} source ranks were recorded for {num_devices} devices;"
            " expected samples, or as many ranks, to tell where tokens are"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Following:
    """A rule by which placements follow the load from step to step; one run is kept for each part of a trace."""

    decide: "Decide"
    costs: "Costs"
    split: "Split" = "quota"  #: How each step is dealt out over replicas
    record_steps: int = 1  #: Steps that a recorded one stands for
    horizon_steps: float = 100.0  #: Over which a change must pay
    quantile: float = 0.0  #: Of steps, by which it must; 0: their mean
    workers: Workers | None = None  #: What replays the layers
    _known: "dict[bytes, Run]" = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, decision: RebalancingDecision, workers: Workers | None = None) -> Self:
        """The rule of a plan."""
        decide, costs = policy_of(decision)
        split: Split = "capacity" if decision.method == "paper" else "quota"
        quantile = decision.quantile or 0.0
        return cls(decide, costs, split, decision.record_steps, decision.horizon_steps, quantile, workers)

    def run(self, pairs: NDArray[np.integer], placement: Placement, group: int) -> "Run":
        """The run on the pairs of a part's steps, in their order, from a placement on, `[B, L, E, D]`."""
        from ...solvers.flexmoe import follow

        start, records = tables_of(placement), np.ascontiguousarray(pairs[:, :, None], np.int64)
        digest = hashlib.sha256(records.ravel().data)
        digest.update(start.ravel().data)
        key = digest.digest()
        if key not in self._known:
            self._known[key] = follow(
                records,  # of one micro-batch a step
                start,
                self.decide,
                self.costs,
                group=group,
                steps=self.record_steps,
                split=self.split,
                horizon=self.horizon_steps,
                quantile=self.quantile,
                workers=self.workers,
            )
        return self._known[key]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Holders of experts in each period of a part's steps: one period where the placement stays."""

    holders: "Sequence[Sequence[Holders]]"  #: `[R][L]`
    homes: Ints  #: The device of each expert's parameters, `[R, L, E]`
    period: Ints  #: Of each step, `[B]`
    #: Experts that move before a step: rows of (step, layer, expert, from, to), `[N, 5]`; None where nothing may change
    sent: Ints | None = None

    @classmethod
    def of(cls, journey: "Journey", pairs: NDArray[np.integer], group: int) -> "Held":
        """Holders on a journey whose steps have these pairs, `[B, L, E, D]`; nodes of `group` devices."""
        from ...solvers.flexmoe.follow import first_homes
        from ...solvers.flexmoe.state import holders_in, holds, homes_after
        from ...solvers.step_split import layer_holders

        placement = journey.placement
        if journey.following is None:
            homes_LE = np.array([owners_of(placement.holds(layer)) for layer in range(placement.num_layers)])
            return cls([layer_holders(placement, group)], homes_LE[None], np.zeros(len(pairs), np.int64))
        run, num_experts = journey.following.run(pairs, placement, group), placement.num_experts
        homes_RLE = [[first_homes(table, num_experts) for table in run.tables[0]]]
        for tables in run.tables[1:]:
            changes = zip(homes_RLE[-1], tables, strict=True)
            homes_RLE.append([homes_after(home, holds(table, num_experts), group) for home, table in changes])
        holders = cache(
            lambda table: holders_in(np.frombuffer(table, np.int64).reshape(run.tables.shape[2:]), num_experts, group)
        )
        held = [[holders(table.tobytes()) for table in tables] for tables in run.tables]
        return cls(held, np.array(homes_RLE), run.period, run.sent)

    def sums(self, num_classes: int) -> Floats:
        """Gradient rows that leave (0) and reach (1) each device in every step as replicas are summed.

        `[2, B, L, C, 2, D]`: among replicas (0), then to the owners of experts (1).
        """
        from ...solvers.flexmoe.state import sums_of

        layers = [map(sums_of, *of_period) for of_period in zip(self.holders, self.homes, strict=True)]
        rows_RL2C2D = np.array([[*of_layers] for of_layers in layers])
        return by_class(np.moveaxis(rows_RL2C2D[self.period], 2, 0), num_classes, axis=3)

    def moves(self, num_layers: int, num_devices: int, num_classes: int, group: int) -> Floats:
        """Experts that leave (0) and reach (1) each device before each step, `[B, L, C, 2, D]`."""
        assert self.sent is not None
        moved = np.zeros((len(self.period), num_layers, 2, 2, num_devices))
        step, layer, _, source, target = self.sent.T
        far = (source // group != target // group).astype(np.int64)
        np.add.at(moved, (step, layer, far, 0, source), 1)
        np.add.at(moved, (step, layer, far, 1, target), 1)
        return by_class(moved, num_classes)


def by_class(rows: NDArray[Any], num_classes: int, axis: int = 2) -> NDArray[Any]:
    """Rows by link class along an axis, of those inside nodes (0) and between them (1)."""
    return rows if num_classes == 2 else rows.sum(axis=axis, keepdims=True)
