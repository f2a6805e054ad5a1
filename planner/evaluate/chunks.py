"""Chunks: how passes of MoE layers are cut, and the seconds of a tally's layers whose exchanges and experts overlap.

The forward pass keeps a graph for every piece that a backward chunk takes back, so experts are called piece by piece,
and layers are cut into pieces at the boundaries of either pass (runtime/engine/chunks.py). Predicted are passes of the
same chunks, and passes of equal chunks of which one degree divides the other: with p pieces, each chunk of a pass of
degree r is p / r calls of the experts, all alike.

A chunk is a share of every device's tokens, in whole tokens, so the busiest port and the busiest device of a layer stay
so in each of its chunks, and decide how long that takes; under a fixed capacity, of every expert's rows, padded to a
multiple of the pieces. Ranks agree on the counts of all chunks once, before the first one of a forward pass, and the
backward pass knows them: what a chunk takes is the exchange's curve less that agreement (`CostModel.agreements`), and
no less than its share of the whole layer's: a link that passes a burst after a pause does not between chunks.
`dispatch_s`, `experts_s` and `combine_s` are how long a stage is busy, the agreement a dispatch; stages overlap, and a
pass takes `moe_s` or `moe_backward_s`.

Legend: B steps; L MoE layers; C chunks of a cut, or one that stands for all where they are alike; D devices; Q levels
of a source's curves (low, middle, high).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...profilers.cluster import Cluster
from ...profilers.fits.fit import Prediction
from ...runtime.decisions import SHARE_DIGITS, DispatchModel, PipelineDecision, boundaries
from ...runtime.wire import Wire, copy_bytes
from ...solvers.arrays import Floats, Ints
from ...solvers.pipemoe.seconds import chunk_seconds, layer_seconds
from ...solvers.ports import Busiest, link_classes, num_peers
from ...solvers.seconds import (
    Curve,
    Curve3,
    encoded_rows,
    expert_seconds,
    no_seconds,
    only_where,
    port_seconds,
    scaled,
    slowest,
    total,
)
from ...traces.model import ModelSpec
from .scene import Passes, Scene
from .tally import Tally

SLACK = 1e-9  # a share that is 1 / r but for rounding takes no row more
Stages = tuple[Prediction, Prediction, Prediction]
Work = list[Ints]  # of each chunk
Rows = list[tuple[Busiest, Ints]]  # of each chunk: what decides how long it takes, and rows encoded and decoded


@dataclass(frozen=True, slots=True)
class Cut:
    """The chunks of one pass of every layer."""

    degree: Ints  #: Number of chunks, `[L]`
    calls: Ints  #: Calls of the experts per chunk, `[L]`
    #: Of a layer in each of its chunks, `[C, L]`, 0 beyond its last; None: equal ones
    shares: Floats | None = None

    @classmethod
    def equal(cls, degree: int, num_layers: int, calls: int = 1) -> Self:
        """Equal chunks, as many in every layer."""
        return cls(np.full(num_layers, degree), np.full(num_layers, calls))

    @classmethod
    def of(cls, shares: Sequence[Sequence[float]], calls: Ints | None = None) -> Self:
        """Chunks of these shares, a tuple per layer; `calls` of the experts per chunk, by default 1."""
        degree_L = np.array([len(column) for column in shares])
        share_CL = np.zeros((degree_L.max(), len(shares)))
        for layer, column in enumerate(shares):
            share_CL[: len(column), layer] = column
        return cls(degree_L, np.ones_like(degree_L) if calls is None else calls, share_CL)

    def parts(self, rows: Ints, calls: Ints | int = 1) -> list[Ints]:
        """Rows of each chunk, or of each of its `calls` `[L]`, of `rows` `[B, L, ...]`, rounded up to whole rows.

        Whole layers keep their rows, which are fractions where they are means or expectations.
        """
        other_axes = (1,) * (rows.ndim - 2)
        if self.shares is None:
            pieces = (calls * self.degree).reshape(-1, *other_axes)
            return [np.where(pieces == 1, rows, -(-rows // pieces))]
        parts = (self.shares / calls).reshape(*self.shares.shape, *other_axes)
        return [np.where(part == 1, rows, np.ceil(part * rows - SLACK).astype(np.int64)) for part in parts]

    def padded(self, rows: Ints) -> Ints:
        """`rows` `[B, L]` padded to a multiple of the pieces, as the runtime pads a fixed capacity."""
        pieces_L = self.degree * self.calls
        return np.asarray(-(-rows // pieces_L) * pieces_L)

    def padded_sizes(self, rows: Ints) -> list[Ints]:
        """Rows of each chunk, of `rows` `[B, L]` padded to a fixed capacity."""
        padded_BL = self.padded(rows)
        if self.shares is None:
            return [padded_BL // self.degree]
        ends = [np.rint(end_L * padded_BL) for end_L in np.cumsum(self.shares, axis=0).round(SHARE_DIGITS)]
        return [(end - start).astype(np.int64) for start, end in pairwise([np.zeros_like(ends[0]), *ends])]

    def busy(self, seconds: Floats) -> Floats:
        """Seconds that a stage works whose chunks take `seconds` `[..., C, B, L]`, `[..., B, L]`."""
        return np.asarray(seconds.sum(axis=-3) * (self.degree if self.shares is None else 1))

    def layer_s(self, *stages: Floats, full_duplex: bool) -> Floats:
        """Seconds of a layer from its first chunk to its last one's end, `[..., B, L]`, of stages `[..., C, B, L]`."""
        if self.shares is None:
            first, middle, last = (stage[..., 0, :, :] for stage in stages)
            return layer_seconds(self.degree, first, middle, last, full_duplex=full_duplex)
        return chunk_seconds(*(np.moveaxis(stage, -3, 0) for stage in stages), full_duplex=full_duplex)


@dataclass(frozen=True, slots=True)
class Cuts:
    """A cut for each pass; `backward` is None without one."""

    forward: Cut
    backward: Cut | None

    @classmethod
    def of(cls, decision: PipelineDecision) -> Self:
        """The cuts that carry a decision out; `InputError` where passes cut each other's chunks unevenly."""
        shares = decision.shares
        forward_L, backward_L = np.array(decision.forward), np.array(decision.backward or decision.forward)
        pieces_L = np.maximum(forward_L, backward_L)
        fits = pieces_L % np.minimum(forward_L, backward_L) == 0
        if shares is not None and shares.backward is not None:
            fits &= [_fit(*both) for both in zip(shares.forward, shares.backward, strict=True)]
        if not fits.all():
            layer = int(fits.argmin())
            raise InputError(
                f"MoE layer {layer} in {forward_L[layer]} chunks forward and {backward_L[layer]} backward, which cut"
                " each other unevenly; expected the same chunks, or equal ones of which one number divides the other"
            )
        calls = [pieces_L // degree_L for degree_L in (forward_L, backward_L)]
        cuts = [Cut(forward_L, calls[0]), Cut(backward_L, calls[1])]
        if shares is not None:
            passes = (shares.forward, shares.backward or shares.forward)
            cuts = [Cut.of(one, calls_L) for one, calls_L in zip(passes, calls, strict=True)]
        return cls(cuts[0], None if decision.backward is None else cuts[1])


@dataclass(frozen=True, slots=True)
class ChunkSeconds:
    """Seconds of the chunks of a cut in their three stages, `[C, B, L]`; the exchanges one a link class, too.

    The agreement on counts is in none of them.
    """

    cut: Cut
    dispatch_by_class: list[Prediction]
    experts: Prediction
    combine_by_class: list[Prediction]

    @property
    def stages(self) -> Stages:
        """Dispatch, experts, combine."""
        return slowest(self.dispatch_by_class), self.experts, slowest(self.combine_by_class)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Time model of a tally's layers at any cuts; the scene has curves of exchanges and experts."""

    tally: Tally
    scene: Scene
    passes: Passes
    dispatch_model: DispatchModel
    #: Every expert has a buffer of that many times the mean rows from each device, all of it sent and computed whether
    #: used or not (`capacity`); None: what is routed is sent
    capacity_factor: float | None = None
    wire: Wire | None = None  #: The form in which hidden vectors travel; None: as they are

    def priced(self, cuts: Cuts, *, combines: bool = True) -> tuple[dict[str, Prediction], Floats]:
        """The seconds of stages and passes by metric `[B, L]`, and of all passes under every pair of levels `[Q Q, B]`.

        Nothing `combines` where tokens live next where their expert is.
        """
        chunks, cluster = self.chunks(cuts.forward), self.scene.cluster
        if not combines:
            nothing = [no_seconds(part.seconds.shape) for part in chunks.combine_by_class]
            chunks = replace(chunks, combine_by_class=nothing)
        busy = partial(_each, cuts.forward.busy)
        dispatches = zip(map(busy, chunks.dispatch_by_class), self._agreements, strict=True)
        layers = by_class("dispatch", [later(part, seconds) for part, seconds in dispatches], cluster)
        layers |= by_class("combine", [*map(busy, chunks.combine_by_class)], cluster)
        layers["experts_s"] = busy(chunks.experts)
        passes = {"moe_s": (cuts.forward, chunks.stages, self.agreement_s)}
        if cuts.backward is not None:
            passes["moe_backward_s"] = (cuts.backward, self._reversed(self.chunks(cuts.backward)), 0.0)
        for name, (cut, stages, agreement_s) in passes.items():
            seconds = _each(partial(cut.layer_s, full_duplex=self.passes.full_duplex), *stages)
            layers[name] = later(seconds, agreement_s)
        crossed_QB: Floats = np.sum([self._crossed(*one).sum(axis=2) for one in passes.values()], axis=0)
        return layers, crossed_QB

    @property
    def agreement_s(self) -> float:
        """Seconds of agreeing on a layer's counts, before the first chunk of a forward pass."""
        return max(self._agreements)

    @property
    def _agreements(self) -> Sequence[float]:
        """Seconds of that agreement in each link class."""
        assert self.scene.costs is not None
        return self.scene.costs.agreements_of(self.dispatch_model)

    def chunks(self, cut: Cut) -> ChunkSeconds:
        """The seconds of the chunks that every layer is cut into."""
        costs, each = self.scene.costs, copy_bytes(self.scene.model, self.wire)
        assert costs is not None
        whole = costs.exchanges(self.dispatch_model)
        assert whole is not None
        curves = [_agreed(curve, seconds) for curve, seconds in zip(whole, self._agreements, strict=True)]
        assert costs.experts is not None
        assert each is not None
        dispatch, pairs, combine = self._work(cut)
        present = None if cut.shares is None else (cut.shares > 0)[:, None]  # chunks that a layer has
        stacked = partial(_each, lambda *chunks: np.stack(chunks) if present is None else np.stack(chunks) * present)
        calls = stacked(*(expert_seconds(one, self.tally.slots, costs.experts) for one in pairs))
        encoding = None if self.wire is None else costs.encoding
        exchanged = partial(_exchanged, copy_bytes=each, curves=curves, encoding=encoding)
        sent, returned = (zip(*map(exchanged, chunks), strict=True) for chunks in (dispatch, combine))
        links = [[stacked(*link) for link in exchange] for exchange in (sent, returned)]
        if cut.degree.max() > 1:
            share_CL = 1 / cut.degree[None] if cut.shares is None else cut.shares
            uncut = self._work(Cut.equal(1, len(cut.degree)))
            for exchange, (layer,) in zip(links, (uncut[0], uncut[2]), strict=True):
                least = (scaled(share_CL[:, None], seconds) for seconds in exchanged(layer))
                exchange[:] = [_each(np.maximum, *both) for both in zip(exchange, least, strict=True)]
        return ChunkSeconds(cut, links[0], scaled(cut.calls, calls), links[1])

    def pass_s(self, chunks: ChunkSeconds, *, back: bool = False) -> Floats:
        """Seconds of the forward or the backward pass, mean over steps, `[Q Q, L]`, the curves themselves midmost.

        Exchanges are at each level with experts at each.
        """
        stages = self._reversed(chunks) if back else chunks.stages
        return np.asarray(self._crossed(chunks.cut, stages, 0.0 if back else self.agreement_s).mean(axis=1))

    def both(self, cuts: Cuts) -> Floats:
        """Seconds of all passes under the curves themselves, mean over steps, `[L]`."""
        passes = [self.pass_s(self.chunks(cuts.forward))]
        if cuts.backward is not None:
            passes.append(self.pass_s(self.chunks(cuts.backward), back=True))
        seconds_QL = np.sum(passes, axis=0)
        return np.asarray(seconds_QL[len(seconds_QL) // 2])

    def _work(self, cut: Cut) -> tuple[Rows, Work, Rows]:
        """Work per chunk: copies of dispatch, pairs per call of experts, copies of combine, as in `solvers.seconds`."""
        ports, slots_D, cluster = self.tally.ports, self.tally.slots, self.scene.cluster
        assert ports is not None
        assert self.scene.costs is not None
        if self.capacity_factor is None:
            exchanges = list[Rows]()
            for copies, kept in ports.exchanges():
                busiest = self.scene.costs.shared.busiest(copies, kept)
                rows = encoded_rows(copies, kept) if self.wire else np.zeros(copies.shape[:2], np.int64)
                parts = zip(cut.parts(busiest.port), cut.parts(busiest.beside), cut.parts(rows), strict=True)
                exchanges.append([(Busiest(port, beside, busiest.evenness), rows) for port, beside, rows in parts])
            return exchanges[0], cut.parts(self.tally.loads, cut.calls), exchanges[1]
        size, group = cluster.num_devices, cluster.devices_per_node
        slots_C = slots_D[0] * np.array([num_peers(link, size, group) for link in link_classes(cluster)])
        filled = cut.padded_sizes(capacity(self.tally, self.scene.model, self.capacity_factor))
        own_C = slots_D[0] * (np.arange(len(slots_C)) == 0)
        padded = [
            (Busiest(one[..., None] * slots_C, one[..., None] * own_C, np.ones(1)), one * slots_D.sum())
            for one in filled
        ]
        pairs = [(one // cut.calls)[:, :, None] * slots_D * len(slots_D) for one in filled]
        return padded, pairs, padded

    def _reversed(self, chunks: ChunkSeconds) -> Stages:
        """Gradients go back through the combine, the experts, `backward` times as long, and the dispatch."""
        dispatch, experts, combine = chunks.stages
        return combine, scaled(self.passes.backward, experts), dispatch

    def _crossed(self, cut: Cut, stages: Stages, agreement_s: float) -> Floats:
        """Seconds of a pass after an agreement, exchanges at each level with experts at each, `[Q Q, B, L]`."""
        first, middle, last = (np.stack([one.low, one.seconds, one.high]) for one in stages)
        seconds = cut.layer_s(first[:, None], middle[None], last[:, None], full_duplex=self.passes.full_duplex)
        return agreement_s + seconds.reshape(-1, *seconds.shape[2:])


def capacity(tally: Tally, model: ModelSpec, factor: float) -> Ints:
    """Rows of an expert from one device, `[B, L]`, where the capacity is fixed.

    Notes
    -----
    As Tutel has it (`extract_critical` in tutel/impls/fast_dispatch.py): K int(F ceil(T / E)), T the tokens of the
    fullest device, E experts, K a token.
    """
    assert tally.ports is not None
    mean_BL = -(-tally.ports.tokens.max(axis=2) // model.num_experts)
    rows_BL = np.floor(factor * mean_BL).astype(np.int64)
    return np.broadcast_to(model.top_k * rows_BL, tally.loads.shape[:2])


def by_class(name: str, seconds: list[Prediction], cluster: Cluster) -> dict[str, Prediction]:
    """A part that crosses links: `{name}_s`, the slowest class, and each class alone where there are two."""
    parts = {f"{name}_s": slowest(seconds)}
    if len(seconds) > 1:
        parts |= {f"{name}_{link}_s": part for link, part in zip(link_classes(cluster), seconds, strict=True)}
    return parts


def with_encoding(seconds: list[Prediction], rows: Floats, curve: Curve | None) -> list[Prediction]:
    """Seconds `[B, L]` of an exchange in each link class, with those of encoding and decoding so many rows `[B, L]`.

    Every class that takes time waits for all rows; where none does, the first one has these seconds.
    """
    if curve is None:
        return seconds
    crossed = [part.seconds > 0 for part in seconds]
    crossed[0] = crossed[0] | ~np.any(crossed, axis=0)
    encoding = only_where(rows > 0, curve(rows))
    return [total([part, only_where(busy, encoding)]) for part, busy in zip(seconds, crossed, strict=True)]


def _fit(forward: Sequence[float], backward: Sequence[float]) -> bool:
    """Check whether the chunks of both passes, as the runtime rounds them, are the same, or all of a pass alike."""
    if len(forward) == len(backward):
        return boundaries(forward) == boundaries(backward)
    return all(boundaries(one) == boundaries([1 / len(one)] * len(one)) for one in (forward, backward))


def _agreed(curve: Curve3, agreement_s: float) -> Curve3:
    """The curve of an exchange whose counts are known: half of a round trip less half of the agreement in it."""
    return lambda *sizes: later(curve(*sizes), -agreement_s / 2)


def _exchanged(
    chunk: tuple[Busiest, Ints], copy_bytes: float, curves: Sequence[Curve3], encoding: Curve | None
) -> list[Prediction]:
    """Seconds of one exchange of a chunk in each link class, `[B, L]` each."""
    busiest, rows = chunk
    return with_encoding(port_seconds(busiest, copy_bytes, curves), rows.astype(np.float64), encoding)


def later(part: Prediction, seconds: float) -> Prediction:
    """A prediction, `[B, L]`, so many seconds longer; none is below 0."""
    low, middle, high = (np.maximum(level + seconds, 0.0) for level in (part.low, part.seconds, part.high))
    return Prediction(middle, low, high, part.extrapolated)


def _each(how: Callable[..., NDArray[Any]], *parts: Prediction) -> Prediction:
    """`how` of parts at every level, where it grows with each of them; extrapolated where any of what it takes is."""
    columns = ([getattr(part, name) for part in parts] for name in ("seconds", "low", "high", "extrapolated"))
    seconds, low, high, extrapolated = (how(*column) for column in columns)
    return Prediction(seconds, low, high, extrapolated > 0)
