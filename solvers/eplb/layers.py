"""Layers to be balanced: placed as published, then refined for their loads and for their steps; groups kept whole.

Legend: B steps; L MoE layers; E experts per layer; D devices; N nodes; Q groups.
"""

from dataclasses import dataclass, replace

import numpy as np

from ...errors import UsageError
from ...workers import Workers
from ..arrays import Bools, Floats, Ints
from ..balance import balance, device_loads, splits_steps, step_balance
from ..compiled import seconds_to_compile
from ..placement import BY_STEP, Placement, ReplicaRule, block_devices
from .published import Deal, dealt_best, published, published_groups, refined_groups
from .rows import LEAST_WORK, Rows, lowest_max, pinned_groups, refined, with_pins
from .splits import split_refined
from .steps import even_mean, step_refined, with_resampled

ONE_STEP_WORK = 5_000_000  # a row: some 8 ms of a core, where the search over several steps takes up to 200


@dataclass(frozen=True, slots=True)
class Layers:
    """Balancing problem of all layers: loads, slots, groups and steps."""

    #: loads, slots, pinned: `[L, E]`, `[D]`, and whether a device must hold an expert, `[D, E]`
    loads: Floats
    slots: Ints
    pinned: Bools
    #: The groups of every node, ascending, `[L, N, Q / N]`, where none is to be split; None: experts go anywhere
    groups: Ints | None
    #: steps, quantile: the loads of steps `[B, L, E]`, where they are known, and which quantile of them counts; None:
    #: their mean
    steps: Floats | None
    quantile: float | None
    rule: ReplicaRule = ReplicaRule.EVEN  #: By which replicas share an expert's load

    @classmethod
    def of(
        cls, loads: Floats, slots: Ints, pinned: Bools, num_nodes: int, num_groups: int | None, quantile: float | None
    ) -> "Layers":
        """The layers of loads `[L, E]`, or of steps `[B, L, E]`, groups kept on nodes where that has a form."""
        steps_BLE = loads if loads.ndim == 3 else None
        loads_LE = loads if steps_BLE is None else steps_BLE.mean(axis=0)
        groups_LNQ = published_groups(loads_LE, slots, pinned, num_nodes, num_groups)
        return cls(loads_LE, slots, pinned, groups_LNQ, steps_BLE, quantile)

    def published(self) -> tuple[Placement, int]:
        """The published placement, what is pinned put into it, and the choices repaired."""
        rows, table_Rp, repaired = self._published()
        return replace(rows.placement(table_Rp, len(self.loads)), replica_rule=self.rule), repaired

    def dealt(self) -> Deal | None:
        """The best way to deal groups to nodes; None where they need not be kept, or there are too many ways."""
        return None if self.groups is None else dealt_best(self.loads, self.slots, *self.groups.shape[1:])

    def refined(self, placement: Placement, deal: Deal | None, workers: Workers | None = None) -> Placement:
        """A placement that no layer of the published one is better than."""
        one_step = self.steps is not None and len(self.steps) == 1 and not splits_steps(placement)
        found = self._refined(placement, deal, ONE_STEP_WORK if one_step else LEAST_WORK)
        num_nodes = 1 if self.groups is None else self.groups.shape[1]
        if splits_steps(found):
            steps_BLE = self.loads[None] if self.steps is None else self.steps
            return split_refined(steps_BLE, [placement, found], self.pinned, num_nodes, workers)
        if self.steps is None or one_step:
            return found
        return step_refined(self.steps, [placement, found], self.pinned, num_nodes, self.quantile, workers)

    def robust(self, placement: Placement, deal: Deal | None, workers: Workers | None = None) -> Placement:
        """A placement refined for the steps and for means of steps resampled from them."""
        assert self.steps is not None
        return replace(self, steps=with_resampled(self.steps)).refined(placement, deal, workers)

    def value(self, placement: Placement) -> float:
        """Objective of a placement; less is better."""
        if self.steps is None:
            return balance(self.loads, placement)
        return step_balance(self.steps, placement, self.quantile)

    @property
    def bound_kind(self) -> str:
        """Kind of the bound that no placement beats."""
        splits = self.rule in BY_STEP and self.slots.sum() > self.loads.shape[1]
        return "mean" if self.quantile is not None or splits else "mean and largest replica"

    def bound(self, deal: Deal | None) -> float:
        """Lower bound on the value of any placement, or with groups dealt at their best. It is the mean, 1, for a
        quantile and where steps are split exactly.
        """
        if self.bound_kind == "mean":
            return 1.0
        num_devices = int(np.count_nonzero(self.slots))
        if self.steps is not None:
            even = replace(self, loads=even_mean(self.steps, num_devices))
            least_L = even._least(None if deal is None else even.dealt())
            return float(np.maximum(least_L, 1.0).mean())
        mean_L = self.loads.sum(axis=1) / num_devices
        return float(np.divide(self._least(deal), mean_L, out=np.ones_like(mean_L), where=mean_L > 0).mean())

    def _least(self, deal: Deal | None) -> Floats:
        """The load that no layer's busiest device is below, `[L]`."""
        least_L = lowest_max(self.loads, self.slots)
        return least_L if deal is None else np.maximum(least_L, deal.least)

    def _refined(self, placement: Placement, deal: Deal | None, least_work: int) -> Placement:
        """The better of two, layer by layer: a published one, and where the groups dealt at their best lead."""
        groups = self.groups
        if groups is not None and (deal is None or self.pinned.any()):
            groups = refined_groups(self.loads, self.pinned, groups)
        elif deal is not None:
            groups = deal.groups
        rows, table_Rp, _ = replace(self, groups=groups)._published()
        found = rows.placement(refined(rows, table_Rp, len(self.loads), least_work), len(self.loads))
        better_L = device_loads(self.loads, found).max(axis=1) < device_loads(self.loads, placement).max(axis=1)
        table_LP = np.where(better_L[:, None], found.physical_to_logical, placement.physical_to_logical)
        return replace(placement, physical_to_logical=table_LP)

    def _published(self) -> tuple[Rows, Ints, int]:
        rows = Rows.of(self.loads, self.slots, self.pinned, self.groups)
        table_Rp, repaired = published(rows.load, rows.slots)
        return rows, with_pins(table_Rp, rows.load, rows.slots, rows.pinned), repaired


def compile_refinement(shape: tuple[int, ...], rule: ReplicaRule) -> float:
    """Compile what refines loads `[L, E]` or `[B, L, E]` for a replica rule, or load it; seconds taken."""
    # Of two layers arrays lie otherwise than of one, which is another type to the compiler.
    two = np.ones([min(size, 2) for size in shape[:-1]] + [2])
    slots = np.array([2, 1]) if rule in BY_STEP else np.ones(2, np.int64)
    tiny = replace(Layers.of(two, slots, np.zeros((2, 2), np.bool_), 1, None, None), rule=rule)
    return seconds_to_compile(lambda: tiny.refined(tiny.published()[0], None))


def whole_layers(
    loads: Floats, slots: Ints, pinned: Bools, num_groups: int | None, quantile: float | None
) -> tuple[Layers, int]:
    """The layers to balance, and how many experts each of theirs stands for.

    Where a device holds one group or several, a layer's experts are the groups. Where a group fills several devices,
    these are a node of its own: group q goes to block q, which is as good as any, or where it is pinned.

    Parameters
    ----------
    loads, slots, pinned
        `[L, E]` or `[B, L, E]`, `[D]`, `[D, E]`.

    Raises
    ------
    UsageError
        Groups that cannot be whole, or not with these pins.
    """
    num_experts = loads.shape[-1]
    if num_groups is None:
        raise UsageError("whole groups of a model without expert groups; expected one with them, or --groups split")
    width = block_devices(num_experts, num_groups, slots)
    num_blocks = num_groups if width else len(slots)
    pinned_NQ = pinned_groups(pinned, num_blocks, num_groups)
    if (pinned_NQ.sum(axis=0) > 1).any() or (pinned_NQ.sum(axis=1) > num_groups // num_blocks).any():
        raise UsageError(
            f"pins need an expert group in two places, or more than {num_groups // num_blocks} in one; expected pins"
            " that leave groups whole (--groups whole)"
        )
    if width:
        return Layers.of(loads, slots, pinned, num_groups, num_groups, quantile), 1
    size = num_experts // num_groups
    load_BLQ = loads.reshape(*loads.shape[:-1], num_groups, size).sum(axis=-1)
    return Layers.of(load_BLQ, slots // size, pinned_NQ, 1, None, quantile), size
