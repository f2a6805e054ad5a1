"""A tally: what a journey did with a cohort of a trace, by unit and by step; and the traffic of single samples.

Legend: L MoE layers; U units; I samples; B steps; C link classes; D devices; N nodes; E experts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...profilers.cluster import Cluster
from ...runtime.decisions import DispatchModel
from ...solvers.placement import Placement, ReplicaRule
from ...solvers.ports import link_classes
from ...solvers.replicas import ReplayRule
from .splits import Cohort

MAX_CELLS = 2**27
COUNTS = ("tokens", "hops", "hops_kept", "node_hops_kept", "device_copies", "node_copies", "far_copies")


@dataclass(frozen=True, slots=True)
class Ports:
    """Inputs of predicted seconds: copies through every port, and tokens on every device."""

    #: dispatch, combine: copies that leave (0) and reach (1) each device by link class (`ports.link_classes`), int64
    #: `[B, L, C, 2, D]`
    dispatch: NDArray[np.int64]
    combine: NDArray[np.int64]
    #: tokens, contexts: tokens on each device before the layer, and the sum over them of 2 x position + 1, int64
    #: `[B, L, D]`; or `[B, 1, D]` where tokens are at home before every layer
    tokens: NDArray[np.int64]
    contexts: NDArray[np.int64]

    @classmethod
    def empty(cls, dispatch_model: DispatchModel, num_steps: int, num_layers: int, cluster: Cluster) -> Self:
        """Ports without traffic. A standard combine retraces the dispatch: `combine` is then a mirrored view of it."""
        stays = dispatch_model == "standard"
        shape = (num_steps, num_layers, len(link_classes(cluster)), 2, cluster.num_devices)
        held = (num_steps, 1 if stays else num_layers, cluster.num_devices)
        ways = {"classes": shape[2], "directions": 2, "exchanges": 1 if stays else 2}
        check_cells("copies for seconds", cluster, steps=num_steps, layers=num_layers, devices=held[2], **ways)
        dispatch = np.zeros(shape, np.int64)
        combine = dispatch[:, :, :, ::-1] if stays else np.zeros(shape, np.int64)
        return cls(dispatch, combine, np.zeros(held, np.int64), np.zeros(held, np.int64))


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of a journey over a cohort of a trace, by unit and by step."""

    #: int64 `[U, len(COUNTS)]`: tokens, transitions of a routed first choice, those that stayed on the device and on
    #: the node, copies to distinct remote devices and nodes, and those to devices of other nodes, over all layers.
    #: `[U, 0]` where only the loads of experts are known.
    counts: NDArray[np.int64]
    #: Token-expert pairs of every device, `[B, L, D]`: int64, or as expected where replicas share loads of experts
    loads: NDArray[Any]
    slots: NDArray[np.int64]  #: Experts of each device, `[D]`
    ports: Ports | None = None  #: None where no seconds are asked for
    #: Copies from every device to every other one in complete steps, dispatch and combine over all layers, int64
    #: `[D, D]`; None where nobody asked
    between: NDArray[np.int64] | None = None
    #: The share of samples that change their device in a combine, mean over layers, by step `[B]`; None where none can
    moved: NDArray[np.float64] | None = None
    #: Token-expert pairs from every device to every expert, `[B, L, D, E]`; None where no buffer has a fixed capacity
    sent: NDArray[np.int32] | None = None

    @classmethod
    def empty(
        cls,
        placement: Placement,
        dispatch_model: DispatchModel,
        cohort: Cohort,
        cluster: Cluster,
        *,
        ports: bool,
        between: bool = False,
        fixed: bool = False,
        by_step: bool = False,
    ) -> Self:
        """A tally of nothing; `by_step`: its counts by step, not by unit."""
        shape = (cohort.num_steps, placement.num_layers, cluster.num_devices)
        check_cells("loads", cluster, steps=shape[0], layers=shape[1], devices=shape[2])
        return cls(
            np.zeros((cohort.num_steps if by_step else len(cohort.unit_ids), len(COUNTS)), np.int64),
            np.zeros(shape, np.int64),
            placement.slots,
            Ports.empty(dispatch_model, *shape[:2], cluster) if ports else None,
            np.zeros((cluster.num_devices, cluster.num_devices), np.int64) if between else None,
            sent=nothing_sent(*shape[:2], placement.num_experts, cluster) if fixed else None,
        )

    @classmethod
    def of_loads(cls, loads: NDArray[np.int64], placement: Placement, rule: ReplayRule | None = None) -> Self:
        """A tally of the loads of experts alone, `[B, L, E]`; `rule` of replicas, None: the placement's.

        Raises
        ------
        UsageError
            The placement has replicas that tokens choose by where they are.
        """
        chosen = placement.replica_rule if rule is None else rule
        if placement.has_replicas and chosen != ReplicaRule.EVEN:
            raise UsageError(
                f"which replica serves a token depends on where it is ({chosen}), and counts do not say;"
                " expected the rule even (--strategy eplb), no replicas, or a trace of tokens"
            )
        return cls(np.zeros((len(loads), 0), np.int64), device_loads(loads, placement), placement.slots)


@dataclass(frozen=True, slots=True, eq=False)
class SampleTraffic:
    """Traffic of every sample under one placement."""

    placement: Placement  #: Its replicas, if any, are used evenly
    #: copies, nodes: copies of each sample to every device, one a token and distinct device, and tokens that visit each
    #: node, int32 `[I, L, D]` and `[I, L, N]`. Where only counts are known, one a token-expert pair.
    copies: NDArray[np.int32]
    nodes: NDArray[np.int32]
    pairs: NDArray[np.int32]  #: Token-expert pairs of each sample on every device, int32 `[I, L, D]`
    #: How often a fitted token goes from an expert of layer l to a device at l + 1, int64 `[L-1, E, D]`; None where
    #: only counts are known
    linked: NDArray[np.int64] | None

    @classmethod
    def empty(cls, placement: Placement, num_samples: int, cluster: Cluster, *, linked: bool) -> Self:
        """Table of zeros for one placement."""
        shape = (num_samples, placement.num_layers)
        by_device = (placement.num_layers - 1, placement.num_experts, cluster.num_devices)
        copies = np.zeros((*shape, cluster.num_devices), np.int32)
        return cls(
            placement,
            copies,
            np.zeros((*shape, cluster.num_nodes), np.int32),
            np.zeros_like(copies) if linked else copies,
            np.zeros(by_device, np.int64) if linked else None,
        )

    def following(self, layer: int, place: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """Copies that the samples at these indices send at the next layer, `[I, D]`. None after the last layer."""
        after = layer + 1
        return self.copies[place, after].astype(np.float64) if after < self.copies.shape[1] else None


# Counts samples: their pairs with experts, `[I, L, E]`, and their traffic under each of several placements.
Counter = Callable[[Sequence[Placement]], tuple[NDArray[np.int32], list[SampleTraffic]]]


def device_loads(loads: NDArray[np.int64], placement: Placement) -> NDArray[np.float64]:
    """The load of every device `[B, L, D]` for loads `[B, L, E]`, the replicas of an expert sharing alike."""
    load_BLD = np.empty((*loads.shape[:2], placement.num_devices))
    for layer in range(placement.num_layers):
        held_ED = placement.holds(layer)
        load_BLD[:, layer] = loads[:, layer] @ (held_ED / held_ED.sum(axis=1, keepdims=True))
    return load_BLD


def nothing_sent(num_steps: int, num_layers: int, num_experts: int, cluster: Cluster) -> NDArray[np.int32]:
    """Pairs from every device to every expert, none yet, `[B, L, D, E]`."""
    lengths = {"steps": num_steps, "layers": num_layers, "devices": cluster.num_devices, "experts": num_experts}
    check_cells("pairs under --capacity-factor", cluster, **lengths)
    return np.zeros([*lengths.values()], np.int32)


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
