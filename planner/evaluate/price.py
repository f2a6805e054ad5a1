"""The cost model: seconds of a step and of its parts, from a tally.

Whole layers follow one another, so that

    step_s = attention_s + kv_s + counts_s + folding_s + dispatch_s + experts_s + combine_s + home_s            (1)

Where layers are cut into chunks, exchanges and experts overlap, and seconds add up by pass, no longer by part:

    step_s = attention_s + kv_s + counts_s + folding_s + moe_s + moe_backward_s + home_s + sums_s + moves_s     (2)

A contender whose layers are whole then has one chunk, so that all are priced alike.

Legend: B steps; L MoE layers; Q levels of a source's curves (low, middle, high).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

import numpy as np

from ...profilers.cluster import Cluster
from ...profilers.fits.fit import Prediction
from ...runtime.wire import copy_bytes
from ...solvers.arrays import Floats
from ...solvers.placement import BY_STEP
from ...solvers.seconds import (
    Curve,
    attention_seconds,
    encoded_rows,
    exchange_seconds,
    expert_seconds,
    folding_seconds,
    gather_seconds,
    no_seconds,
    scaled,
    slowest,
    step_seconds,
    total,
)
from .chunks import Cut, Cuts, Pipeline, by_class, later, with_encoding
from .costs import CostModel
from .journey import Journey
from .rebalancing import Held
from .scene import Passes, Scene
from .tally import Tally

STEP: Final = "step_s"
IDEAL: Final = "ideal_step_s"
SOURCES = {  # each part of a step, in order, to what errs as one: all curves of that kind
    "attention_s": "attention",
    "kv_s": "kv",
    "counts_s": "kv",
    "folding_s": "folding",
    "dispatch_s": "exchange",
    "experts_s": "experts",
    "combine_s": "exchange",
    "home_s": "exchange",
    "sums_s": "exchange",
    "moves_s": "exchange",
}
UNCUT = ("attention_s", "kv_s", "counts_s", "folding_s", "home_s", "sums_s", "moves_s")  # parts that no chunk overlaps
PASSES = ("moe_s", "moe_backward_s")


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of the parts of a step, by metric name."""

    #: Low, middle and high of the fits, `[Q, B]`
    levels: Mapping[str, Floats] = field(default_factory=dict)
    #: What each source of error adds to a step, `[Q, B]`, its middle level the fits': exchanges, experts, ...; for
    #: chunks every level of the exchanges with every level of the experts. Empty where a part but attention lacks.
    step: Mapping[str, Floats] = field(default_factory=dict)
    #: The share of calls outside the measured sizes, where there are any
    extrapolated: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenate along steps; `extrapolated` is dropped."""
        levels, step = (
            {name: np.concatenate([one[name] for one in tables], axis=1) for name in tables[0]}
            for tables in ([one.levels for one in parts], [one.step for one in parts])
        )
        return cls(levels, step)


def price(tally: Tally, journey: Journey, scene: Scene) -> Seconds:
    """The seconds of a journey's tally: of those parts that have a curve, and of a step where none but attention lacks.

    By metric: `attention_s`, `dispatch_s`, `experts_s`, `combine_s`, under coherent dispatch `kv_s`; what crosses
    links by class, too, where there are two (`dispatch_inter_s`, ...); of layers in chunks `moe_s` and, trained,
    `moe_backward_s`; of whole layers and even loads `ideal_step_s`.
    """
    if scene.costs is None:
        return Seconds()
    seconds = _priced(tally, journey, scene, scene.costs)
    if STEP in seconds.levels and journey.capacity_factor is None:
        even = _priced(tally.even(), replace(journey, cuts=None), scene, scene.costs)
        seconds = replace(seconds, levels={**seconds.levels, IDEAL: even.levels[STEP]})
    return seconds


def _priced(tally: Tally, journey: Journey, scene: Scene, costs: CostModel) -> Seconds:
    """The seconds of a tally, as they are."""
    passes = scene.passes
    layers, crossed = _around(tally, journey, scene, costs), dict[str, Floats]()
    coherent, num_layers = journey.dispatch_model == "coherent", scene.model.num_layers
    combines = not coherent or scene.model.top_k > 1  # a coherent token with one expert is where it lives next
    piped = passes is not None and costs.exchange and costs.experts and tally.ports is not None
    if passes is not None and piped:
        if coherent:  # such tokens are not trained
            passes = Passes(0.0, passes.full_duplex)
        pipeline = Pipeline(tally, scene, passes, journey.dispatch_model, journey.capacity_factor, journey.wire)
        cuts = cuts_of(journey, passes, num_layers)
        chunked, crossed["moe"] = pipeline.priced(cuts, combines=combines)
        layers |= chunked
    else:
        layers |= _whole(tally, journey, scene, costs, combines=combines)
    if piped and passes is not None and passes.backward and scene.model.expert_bytes is not None:
        layers |= _replicas(tally, journey, scene, costs)
    seconds = {name: step_seconds(part, num_layers) for name, part in layers.items()}
    levels = {name: np.stack([part.low, part.seconds, part.high]) for name, part in seconds.items()}
    parts = [name for name in (*SOURCES, *PASSES) if name in layers]
    needed = {"dispatch_s", "experts_s", "combine_s", *(["kv_s"] if coherent else [])}
    step: dict[str, Floats] = {}
    if needed <= set(parts):
        summed = [name for name in parts if not piped or name in (*UNCUT, *PASSES)]
        levels[STEP] = np.asarray(sum(levels[name] for name in summed))  # (1), (2)
        for name in summed:
            if name in SOURCES:
                step[SOURCES[name]] = step.get(SOURCES[name], 0.0) + levels[name]
        step |= crossed
    outside = {name: float(layers[name].extrapolated.mean()) for name in parts}
    return Seconds(levels, step, {name: share for name, share in outside.items() if share})


def cuts_of(journey: Journey, passes: Passes, num_layers: int) -> Cuts:
    """Cuts of a journey's layers; a whole layer is one chunk."""
    whole = Cut.equal(1, num_layers)
    return journey.cuts or Cuts(whole, whole if passes.backward else None)


def _around(tally: Tally, journey: Journey, scene: Scene, costs: CostModel) -> dict[str, Prediction]:
    """Seconds by layer, `[B, L]`, of what is never cut into chunks: attention, gathers, folding, the way home."""
    ports, model, cluster, layers = tally.ports, scene.model, scene.cluster, dict[str, Prediction]()
    if ports is None:
        return layers
    if attention := costs.attention_of(journey.dispatch_model):
        layers["attention_s"] = attention_seconds(ports.tokens, ports.contexts, attention, ports.calls)
    if journey.dispatch_model == "coherent" and costs.gather:
        kv_bytes = float((model.attention.kv_size or 0) * (model.dtype_bytes or 0))
        layers |= by_class("kv", gather_seconds(ports.tokens, kv_bytes, cluster, costs.gather), cluster)
    if costs.gather and (told := _told_bytes(tally, journey, scene)):
        layers["counts_s"] = scaled(len(told) / model.num_layers, _told(told, len(tally.loads), cluster, costs.gather))
    if tally.folded is not None and costs.folding:
        trains = scene.passes is not None and scene.passes.backward > 0
        rows, pairs = tally.folded
        layers["folding_s"] = folding_seconds(rows, pairs, costs.folding, trains=trains)
    if ports.home is not None and costs.exchange and (each := model.copy_bytes):
        kept = ports.tokens[:, :1] - ports.home[:, :, :, 1].sum(axis=2)  # tokens are as many as they started here
        home = slowest(exchange_seconds(ports.home, each, costs.exchange, kept[:, :, None, None], shared=costs.shared))
        agreement_s = max(costs.agreements_of("standard")) / 2  # the other half of its own: half a trip has one
        layers["home_s"] = scaled(1 / model.num_layers, later(home, agreement_s))
    return layers


def _told(num_bytes: Sequence[float], num_steps: int, cluster: Cluster, gather: Sequence[Curve]) -> Prediction:
    """Seconds of all-gathers of so many bytes of each device, the same in every step, `[B, calls]`.

    None is said to be extrapolated: most are smaller than what was measured, and take as long as the smallest. On
    the CPU they are the backend's own all-gathers, which over four nodes take up to 1 ms longer than was measured.
    """
    bytes_1ND = np.broadcast_to(np.array(num_bytes)[:, None], (1, len(num_bytes), cluster.num_devices))
    one = slowest(gather_seconds(bytes_1ND, 1.0, cluster, gather))
    shape = (num_steps, len(num_bytes))
    seconds, low, high = (np.broadcast_to(level, shape) for level in (one.seconds, one.low, one.high))
    return Prediction(seconds, low, high, np.zeros(shape, np.bool_))


def _told_bytes(tally: Tally, journey: Journey, scene: Scene) -> list[float]:
    """Bytes that each device tells all others in a step before anything can travel, by all-gather.

    Where steps are split by their counts (`runtime.engine.step_quota`) the pairs of every expert, int32, in each layer.
    Where samples move (`runtime.migrating.homes`) the copies to every device and the pairs of every expert of each
    sample, int32, in each layer, and before the first their number, then two int64 of each. Under coherent dispatch
    (`runtime.coherent`) the number of tokens before every layer, and the same before the first.
    """
    model, size = scene.model, scene.cluster.num_devices
    if journey.dispatch_model == "standard":
        splits = journey.following is not None or (journey.placement.has_replicas and journey.rule in BY_STEP)
        return [4.0 * model.num_experts] * model.num_layers * splits
    samples = tally.units / size  # of a device in a step
    in_layer = 8.0 if journey.dispatch_model == "coherent" else 4.0 * (size + model.num_experts) * samples
    return [8.0, 16.0 * samples, *[in_layer] * model.num_layers]


def _replicas(tally: Tally, journey: Journey, scene: Scene, costs: CostModel) -> dict[str, Prediction]:
    """Seconds by layer, `[B, L]`, of sums of replicas' gradients and of experts that change their owner, in training.

    Notes
    -----
    A step sums once (`runtime.engine.replica_rows`): replicas of an expert send each other parts of their gradients,
    then each the part that it added up to the owner, and the weights made of it go the same ways backwards: four
    all-to-alls, of each of which the busiest port decides. Experts that move take their optimizer state along, once for
    the steps that a recorded one stands for.
    """
    curves, each = costs.exchange, scene.model.expert_bytes
    assert curves is not None
    assert each is not None
    rows, moves = tally.sums, tally.moves
    if rows is None and not journey.placement.has_replicas:
        rows = np.zeros((2, *(1,) * 5))
    elif rows is None:
        rows = Held.of(journey, np.zeros(1, np.int64), scene.cluster.devices_per_node).sums(len(curves))
    shape = (2, *tally.loads.shape[:2], len(curves), 2, tally.loads.shape[2])
    ways = [slowest(exchange_seconds(way, each, curves, shared=costs.shared)) for way in np.broadcast_to(rows, shape)]
    seconds = {"sums_s": scaled(2.0, total(ways)), "moves_s": no_seconds(shape[1:3])}
    if moves is not None:
        assert scene.model.expert_state_bytes is not None
        moved = slowest(exchange_seconds(moves, scene.model.expert_state_bytes, curves, shared=costs.shared))
        seconds["moves_s"] = scaled(1 / scene.record_steps, moved)
    return seconds


def _whole(tally: Tally, journey: Journey, scene: Scene, costs: CostModel, *, combines: bool) -> dict[str, Prediction]:
    """Seconds by layer, `[B, L]`, of the exchanges and the experts of whole layers."""
    ports, each, layers = tally.ports, copy_bytes(scene.model, journey.wire), dict[str, Prediction]()
    curves = costs.exchanges(journey.dispatch_model)
    if ports is not None and curves and each:
        for name, (copies, kept) in zip(("dispatch", "combine"), ports.exchanges(), strict=True):
            seconds = exchange_seconds(copies, each, curves, kept, shared=costs.shared)
            if journey.wire is not None:
                seconds = with_encoding(seconds, encoded_rows(copies, kept), costs.encoding)
            layers |= by_class(name, seconds, scene.cluster)
        if not combines:
            layers |= {name: no_seconds(part.seconds.shape) for name, part in layers.items() if "combine" in name}
    if costs.experts:
        layers["experts_s"] = expert_seconds(tally.loads, tally.slots, costs.experts)
    return layers
