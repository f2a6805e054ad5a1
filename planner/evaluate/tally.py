"""Tally of a journey: copies, loads and moves of a cohort, by unit and by step.

Legend: L MoE layers; U units; B steps; C link classes; D devices; E experts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...profilers.cluster import Cluster
from ...solvers.arrays import Floats, Ints
from ...solvers.cost import inter_ratio
from ...solvers.placement import BY_STEP, DEALS, ReplicaRule
from ...solvers.ports import link_classes
from .cohort import Cohort
from .rebalancing import Held, by_class
from .steps import mixed_rows

if TYPE_CHECKING:
    from .journey import Journey

MAX_CELLS = 2**27
COUNTS = ("tokens", "hops", "hops_kept", "node_hops_kept", "device_copies", "node_copies", "far_copies")


@dataclass(frozen=True, slots=True)
class Ports:
    """Inputs of predicted seconds: copies through every port, and tokens on every device."""

    #: dispatch, combine: copies that leave (0) and reach (1) each device by link class (`ports.link_classes`), int64
    #: `[B, L, C, 2, D]`
    dispatch: Ints
    combine: Ints | None  #: None: it retraces the dispatch
    #: Copies that each device sends itself, in a dispatch (0) and in a combine (1), int64 `[B, L, 2, D]`; or
    #: `[B, L, 1, D]` where tokens are at home before every layer
    kept: Ints
    #: tokens, contexts: tokens on each device before the layer, and the sum over them of 2 x position + 1, int64
    #: `[B, L, D]`; or `[B, 1, D]` where tokens are at home before every layer
    tokens: Ints
    contexts: Ints
    #: Calls of attention on each device before the layer, one a length there, int64 `[B, L, D]`; None: one each
    calls: Ints | None = None
    #: Hidden vectors that leave (0) and reach (1) each device on their way home after the last layer, int64
    #: `[B, 1, C, 2, D]`; None where tokens are at home by then, or no hidden vector goes there
    home: Ints | None = None

    @property
    def combined(self) -> Ints:
        """The copies of the combine, `[B, L, C, 2, D]`; where it retraces the dispatch, a mirrored view of that."""
        return self.dispatch[:, :, :, ::-1] if self.combine is None else self.combine

    def exchanges(self) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
        """Dispatch and combine: copies `[B, L, C, 2, D]`, and those that devices send themselves `[B, L, 1, 1, D]`."""
        kept = self.kept[:, :, None, None]
        return (self.dispatch, kept[..., 0, :]), (self.combined, kept[..., -1, :])

    def each(self, change: Callable[[Ints], NDArray[Any]]) -> Self:
        """The ports with each of their tables changed."""
        tables = {one.name: getattr(self, one.name) for one in fields(self)}
        return replace(self, **{name: change(table) for name, table in tables.items() if table is not None})


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of a journey over a cohort of a trace, by unit and by step."""

    #: int64 `[U, len(COUNTS)]`: tokens, transitions of a routed first choice, those that stayed on the device and on
    #: the node, copies to distinct remote devices and nodes, and those to devices of other nodes, over all layers.
    #: `[U, 0]` where only the loads of experts are known.
    counts: Ints
    #: Token-expert pairs of every device, `[B, L, D]`: int64, or as expected where replicas share loads of experts
    loads: NDArray[Any]
    slots: Ints  #: Experts of each device, shared ones that count included, `[D]`
    ports: Ports | None = None  #: None where no seconds are asked for
    #: Copies from every device to every other one in complete steps, dispatch and combine over all layers, int64
    #: `[D, D]`; None where nobody asked
    between: Ints | None = None
    #: The share of samples that change their device in a combine, mean over layers, by step `[B]`; None where none can
    moved: Floats | None = None
    #: Token-expert pairs from every device to every expert, `[B, L, D, E]`; None where no buffer has a fixed capacity
    sent: NDArray[np.int32] | None = None
    #: Gradient rows that leave (0) and reach (1) each device as replicas are summed, first among themselves, then to
    #: owners, `[2, B, L, C, 2, D]`; None where holders stay
    sums: Floats | None = None
    #: Experts that leave (0) and reach (1) each device before a step, `[B, L, C, 2, D]`; None where experts stay
    moves: Floats | None = None
    #: Where some rows stand for others: copies that each device would send without, its own too (0), and pairs of them
    #: that it compares (1), `[2, B, L, D]`; None where all travel
    folded: Ints | None = None
    units: float = 0.0  #: Units of a complete step, the mean; 0 where steps are recorded or of single tokens
    blocks: "Tally | None" = None  #: Loads and ports by the blocks of a cohort's steps, where it has some

    @classmethod
    def empty(
        cls,
        journey: "Journey",
        cohort: Cohort,
        cluster: Cluster,
        *,
        ports: bool,
        between: bool = False,
        by_step: bool = False,
        shared: int = 0,
    ) -> Self:
        """A tally of nothing; `by_step`: its counts by step, not by unit; so many `shared` experts on every device.

        Where tokens are at home before every layer, a combine retraces the dispatch.
        """
        placement, at_home = journey.placement, journey.dispatch_model == "standard" and journey.moves is None
        classes, devices = len(link_classes(cluster)), cluster.num_devices
        lengths = {"steps": cohort.num_rows, "layers": placement.num_layers, "devices": devices}
        check_cells("loads", cluster, **lengths)
        traffic, sent, shape = None, None, tuple(lengths.values())
        if ports:
            ways = {"classes": classes, "directions": 2, "exchanges": 1 if at_home else 2}
            check_cells("copies for seconds", cluster, **lengths, **ways)
            dispatch = np.zeros((*shape[:2], classes, 2, devices), np.int64)
            combine = None if at_home else np.zeros(dispatch.shape, np.int64)
            tokens, contexts = np.zeros((2, shape[0], 1 if at_home else shape[1], devices), np.int64)
            kept = np.zeros((*shape[:2], 1 if at_home else 2, devices), np.int64)
            calls = np.zeros(shape, np.int64) if journey.dispatch_model == "migrating" else None
            goes_home = journey.dispatch_model == "coherent" and cohort.lanes is None
            home = np.zeros((shape[0], 1, classes, 2, devices), np.int64) if goes_home else None
            traffic = Ports(dispatch, combine, kept, tokens, contexts, calls, home)
        if journey.capacity_factor is not None:
            check_cells("pairs under --capacity-factor", cluster, **lengths, experts=placement.num_experts)
            sent = np.zeros((*shape, placement.num_experts), np.int32)
        counts = np.zeros((shape[0] if by_step else len(cohort.unit_ids), len(COUNTS)), np.int64)
        pairs = np.zeros((devices, devices), np.int64) if between else None
        slots_D = placement.slots + shared * (placement.slots > 0)
        units = 0.0 if cohort.step is None else np.count_nonzero(cohort.step >= 0) / max(cohort.num_steps, 1)
        return cls(counts, np.zeros(shape, np.int64), slots_D, traffic, pairs, sent=sent, units=units)

    @classmethod
    def of_loads(cls, loads: Ints, journey: "Journey", cohort: Cohort) -> Self:
        """A tally of the loads of experts alone, `[B, L, E]`, replicas sharing alike, or as a step is split.

        UsageError where tokens choose replicas by where they are.
        """
        placement, rule = journey.placement, journey.rule
        if not placement.has_replicas or rule == ReplicaRule.EVEN:
            held_LED = map(placement.holds, range(placement.num_layers))
            shares = (held_ED / held_ED.sum(axis=1, keepdims=True) for held_ED in held_LED)
            load_LBD = [loads[:, layer] @ share_ED for layer, share_ED in enumerate(shares)]
        elif rule in BY_STEP:
            from ...solvers.step_split import layer_holders, split_loads

            holders = layer_holders(placement, placement.num_devices)
            load_LBD = [split_loads(loads[:, layer], cohort.step_of_row, of) for layer, of in enumerate(holders)]
        else:
            raise UsageError(
                f"which replica serves a token depends on where it is ({rule}), and counts do not say;"
                " expected a rule that loads tell (even, lp, quota), no replicas, or a trace of tokens"
            )
        return cls(np.zeros((len(loads), 0), np.int64), np.stack(load_LBD, axis=1), placement.slots)

    @classmethod
    def of_pairs(
        cls, pairs: NDArray[np.integer], journey: "Journey", held: Held, cluster: Cluster, *, top_k: int, ports: bool
    ) -> Self:
        """A tally of token-expert pairs by source, `[B, L, E, D]`, each of which is a copy where it leaves its device.

        UsageError where a token chooses its replica for itself.
        """
        from ...solvers.step_deals import traffic_of_steps

        placement, rule = journey.placement, journey.rule
        if rule not in DEALS and placement.has_replicas:
            raise UsageError(f"replica rule {rule} for counts by source rank; expected one of {', '.join(DEALS)}")
        number = DEALS.index(rule if rule in DEALS and placement.has_replicas else "even")
        num_steps, num_layers, _, num_devices = pairs.shape
        classes, ratio = len(link_classes(cluster)), round(inter_ratio(cluster))
        loads, kept = np.zeros((2, num_steps, num_layers, num_devices), np.int64)
        copies = np.zeros((num_steps, num_layers, 2, 2, num_devices), np.int64)
        for period, layer in np.ndindex(len(held.holders), num_layers):
            steps = np.flatnonzero(held.period == period)
            of_layer = pairs[steps, layer].astype(np.int64)
            of_steps = traffic_of_steps(of_layer, held.holders[period][layer], number, ratio)
            loads[steps, layer], copies[steps, layer], kept[steps, layer] = of_steps
        traffic = None
        if ports:
            tokens = pairs[:, :1].sum(axis=2, dtype=np.int64) // top_k
            traffic = Ports(by_class(copies, classes), None, kept[:, :, None], tokens, np.zeros_like(tokens))
        return cls(np.zeros((num_steps, 0), np.int64), loads, placement.slots, traffic).changing(held, cluster)

    def changing(self, held: Held, cluster: Cluster) -> Self:
        """The tally with the sums and moves of those who hold experts from step to step."""
        if held.sent is None:
            return self
        classes, shape = len(link_classes(cluster)), (self.loads.shape[1], cluster.num_devices)
        return replace(self, sums=held.sums(classes), moves=held.moves(*shape, classes, cluster.devices_per_node))

    @property
    def between_per_step(self) -> Floats | None:
        """Copies per step from every device to every other one, `[D, D]`; None where these were not tallied."""
        return None if self.between is None else self.between / len(self.loads)

    @property
    def widest(self) -> int:
        """Cells of a step in the widest table that steps are mixed in."""
        return int(max(self.loads[0].size, self.ports.dispatch[0].size if self.ports else 0, 1))

    def by_step(self, cohort: Cohort) -> Self:
        """The tally with a row a step, of one with a row a block of the cohort's steps."""
        if (blocks := cohort.blocks) is None:
            return self
        return replace(
            self.mixed(blocks.steps),
            between=None if self.between is None else np.rint(blocks.scale * self.between).astype(np.int64),
            sent=None if self.sent is None else mixed_rows(blocks.steps, self.sent),
            blocks=self,
        )

    def even(self) -> Self:
        """The tally if every device with slots had the mean load of each layer and step, and every port the mean."""
        alive_D = self.slots > 0
        loads = np.where(alive_D, self.loads.sum(axis=2, keepdims=True) / alive_D.sum(), 0.0)
        ports = self.ports and self.ports.each(lambda one: np.broadcast_to(one.mean(axis=-1, keepdims=True), one.shape))
        folded = self.folded
        if folded is not None:
            folded = np.broadcast_to(folded.mean(axis=-1, keepdims=True), folded.shape)
        none = np.zeros((2, *(1,) * 5))
        return replace(self, loads=loads, ports=ports, folded=folded, sums=none, moves=None, blocks=None)

    def mixed(self, weights: Floats) -> Self:
        """Weighted sums of the rows of loads and ports, `[B, M]` of `[M, ...]`; nothing else by step."""
        ports = self.ports and self.ports.each(partial(mixed_rows, weights))
        return replace(self, loads=mixed_rows(weights, self.loads), ports=ports, between=None, sent=None, folded=None)


def check_cells(what: str, cluster: Cluster | None, most: int = MAX_CELLS, **lengths: int) -> None:
    """Refuse an array of one number for every step, layer, device and so on that would not fit into memory.

    Fewer devices of a `cluster` would make it smaller; without one only a part of the trace does.
    """
    cells = math.prod(lengths.values())
    if cells > most:
        product = " x ".join(f"{length:,} {name}" for name, length in lengths.items())
        fewer = "by" if cluster is None else f"for fewer than {cluster.num_devices:,} devices or"
        raise UsageError(
            f"{what}: {product} are {cells:,} numbers; expected at most {most:,}: plan {fewer} a part of the trace"
        )
