"""Rows of a layer's tokens, of all devices and steps at once, and those that stand for others, as the runtime has them.

Legend: T tokens; n rows, one a token and distinct device; K experts per token; M hidden size; E experts; D devices.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ....profilers.encoded import decoded, encoded
from ....runtime.condensation import distance
from ....runtime.decisions import Decisions
from ....runtime.engine.chunks import Chunks
from ....runtime.engine.clusters import BLOCK, star
from ....runtime.engine.condenser import standing
from ....runtime.engine.copies import Copies, select
from ....runtime.engine.fold import Fold
from ....runtime.wire import Wire
from ....solvers.arrays import Ints

Gains = tuple[tuple[float, ...], ...]
COUNTS = ("rows", "sent", "far_rows", "far_sent", "pairs", "computed")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of tokens in a layer, by device and step that they leave."""

    copies: Copies
    remote_n: Tensor  #: Whether it goes to another device, bool `[n]`
    far_n: Tensor  #: Whether that is on another node, bool `[n]`
    before: dict[str, int] | None = None  #: Counts before some experts were left out; None: none were

    @classmethod
    def of(cls, ids_TK: Tensor, device_TK: Tensor, home_T: Tensor, step_T: Tensor, shape: tuple[int, int]) -> Self:
        """The rows of tokens by where they are.

        Parameters
        ----------
        device_TK
            Of each chosen expert, -1 where none is routed.
        home_T
            The device of each token; -1: none of `shape`, so that all of its rows travel.
        shape
            Devices, and devices of a node.
        """
        size, group = shape
        copies = select(ids_TK, device_TK.where(device_TK >= 0, size), None, (1, size + 1))
        (real_n,) = (copies.place < size).nonzero(as_tuple=True)
        row_n, device_n = copies.row[real_n], copies.place[real_n]
        home_n = home_T[row_n]
        place_n = (step_T[row_n] * (size + 1) + home_n + 1) * size + device_n
        counts = place_n.new_zeros(1, int(place_n.max()) + 1 if len(place_n) else 1)
        copies = Copies(row_n, None, copies.beside[real_n], place_n, counts)
        return cls(copies, device_n != home_n, device_n // group != home_n.div(group, rounding_mode="floor"))

    def counted(self, stands_n: Tensor) -> dict[str, int]:
        """`COUNTS`: rows to other devices and nodes and experts asked, each before and after condensing."""
        kept_n = stands_n == torch.arange(len(stands_n))
        asked_n = (self.copies.beside >= 0).sum(1)
        tables = (self.remote_n, self.remote_n & kept_n, self.far_n, self.far_n & kept_n, asked_n, asked_n * kept_n)
        counts = dict(zip(COUNTS, (int(table.sum()) for table in tables), strict=True))
        return counts if self.before is None else counts | self.before


# The row that stands for each, int64 `[n]`, of the rows of a layer, their tokens and gate weights `[T, K]`.
Cluster = Callable[[int, Rows, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Gate:
    """Rows whose gates times distance (times gains) are at most `tau`."""

    tau: float
    gains: Gains | None = None  #: By layer, then expert

    def __call__(self, layer: int, rows: Rows, x_TM: Tensor, weight_TK: Tensor) -> Tensor:
        """The row that stands for each."""
        gain_E = None if self.gains is None else torch.tensor(self.gains[layer])
        return standing(rows.copies, x_TM, weight_TK, rows.remote_n, self.tau, cosine=False, gain_E=gain_E)


@dataclass(frozen=True, slots=True)
class Star:
    """LUFFY's own rule: rows whose cosine is at least `threshold`, those kept first that serve most others."""

    threshold: float

    def __call__(self, layer: int, rows: Rows, x_TM: Tensor, weight_TK: Tensor) -> Tensor:
        """The row that stands for each."""
        return standing(rows.copies, x_TM, weight_TK, rows.remote_n, distance(self.threshold), cosine=True)


@dataclass(slots=True)
class History:
    """LUFFY's rule with similarities guessed by the layer before, which layers call in their order.

    Pairs that shared an expert there and had a cosine above `s1` count as alike; those below `s2`, and those that
    shared none, as unlike. Only the rest is computed.
    """

    threshold: float
    s1: float
    s2: float
    computed: list[int] = field(default_factory=lambda: [0, 0])  #: Pairs that were computed, of how many
    _before: tuple[Tensor, Tensor] | None = None  # directions `[T, M]`, experts asked `[T, E]`

    def __call__(self, layer: int, rows: Rows, x_TM: Tensor, weight_TK: Tensor) -> Tensor:
        """The row that stands for each."""
        copies, u_TM = rows.copies, functional.normalize(x_TM.float(), dim=1)
        asked_TE = torch.zeros(len(x_TM), int(copies.beside.max()) + 2 if len(copies.beside) else 1)
        asked_TE.index_put_((copies.row[:, None], copies.beside.long()), torch.ones(()), accumulate=True)
        before, self._before = self._before if layer else None, (u_TM, asked_TE[:, :-1])  # the last: none asked
        stands_n = torch.arange(len(copies.row))
        free_n = rows.remote_n.nonzero().flatten()
        key_nK = torch.cat([copies.place[free_n, None], copies.beside[free_n].sort(1).values.long()], dim=1)
        group_n = torch.from_numpy(np.unique(key_nK.numpy(), axis=0, return_inverse=True)[1].reshape(-1))
        for place_g in free_n[group_n.argsort(stable=True)].split_with_sizes(group_n.bincount().tolist()):
            for place_w in torch.tensor_split(place_g, -(-len(place_g) // BLOCK)):
                token_w = copies.row[place_w]
                alike_ww = u_TM[token_w] @ u_TM[token_w].T >= self.threshold
                if before is not None:
                    guess_ww = before[0][token_w] @ before[0][token_w].T
                    met_ww = before[1][token_w] @ before[1][token_w].T > 0
                    known_ww = ~met_ww | (guess_ww > self.s1) | (guess_ww < self.s2)
                    alike_ww = torch.where(known_ww, met_ww & (guess_ww > self.s1), alike_ww)
                    self.computed[0] += int((~known_ww).triu(1).sum())
                    self.computed[1] += len(place_w) * (len(place_w) - 1) // 2
                room_ww = torch.where(alike_ww.fill_diagonal_(True), 0.0, -1.0)
                stands_n[place_w] = place_w[star(room_ww[None])[0]]
        return stands_n


@dataclass(frozen=True, slots=True)
class Way:
    """A way to send rows."""

    name: str
    cluster: Cluster | None = None  #: None: every row travels
    medoid: bool = False
    wire: Wire | None = None  #: How rows for other devices travel, both ways; None: as they are
    drop: float = 0.0  #: Experts but a token's first are left out below this gate weight
    layers: tuple[int, ...] | None = None  #: In which rows stand for others; None: all

    def stands(self, layer: int, rows: Rows, x_TM: Tensor, weight_TK: Tensor) -> Tensor:
        """The row that stands for each."""
        if self.cluster is None or not self.condenses(layer):
            return torch.arange(len(rows.remote_n))
        return self.cluster(layer, rows, x_TM, weight_TK)

    def condenses(self, layer: int) -> bool:
        """Check whether rows of a layer may stand for others."""
        return self.cluster is not None and layer in (self.layers or (layer,))

    def rows(self, layer: int, ids_TK: Tensor, weight_TK: Tensor, seats: "Seats") -> tuple[Rows, Tensor]:
        """The rows of tokens, and the gate weights of the experts that are asked."""
        device_TK, where = seats.devices(layer, ids_TK), (seats.home, seats.step, seats.shape)
        rows = Rows.of(ids_TK, device_TK, *where)
        if not self.drop:
            return rows, weight_TK
        first_TK = torch.arange(weight_TK.shape[1]) == weight_TK.argmax(1, keepdim=True)
        asks_TK = first_TK | (weight_TK >= self.drop)
        whole = rows.counted(torch.arange(len(rows.remote_n)))
        before = {name: whole[name] for name in ("rows", "far_rows", "pairs")}
        return replace(Rows.of(ids_TK, device_TK.where(asks_TK, -1), *where), before=before), weight_TK * asks_TK


EXACT = Way("none")


def way_of(decisions: Decisions) -> Way:
    """The way in which a plan's decisions send rows at the start, before its schedule moves how near they must be."""
    decision = decisions.condensation
    assert decision is not None
    rule: Star | Gate | None = None
    if decision.criterion == "star":
        cosine = decision.h_max if decision.threshold is None else decision.threshold
        assert cosine is not None
        rule = Star(cosine)
    elif decision.tau:
        rule = Gate(decision.tau, decision.gains)
    return Way("plan", rule, decision.medoid, decisions.wire, layers=decision.layers)


@dataclass(slots=True)
class Counted:
    """`COUNTS` by layer."""

    layers: list[dict[str, int]] = field(default_factory=list)

    def add(self, layer: int, counts: dict[str, int]) -> None:
        """Add those of a step."""
        while len(self.layers) <= layer:
            self.layers.append(dict.fromkeys(COUNTS, 0))
        self.layers[layer] = {name: self.layers[layer][name] + counts[name] for name in COUNTS}

    @property
    def all(self) -> dict[str, int]:
        """Rows of all layers."""
        return {name: sum(layer[name] for layer in self.layers) for name in COUNTS}

    def saved(self, rows: str = "rows", sent: str = "sent", *, layer: int | None = None) -> float:
        """Share of rows that do not travel."""
        of = self.all if layer is None else self.layers[layer]
        return 1 - of[sent] / of[rows] if of[rows] else 0.0


Experts = Callable[[Tensor, Tensor, Tensor], Tensor]  # x [m, M], ids [m, K], weights [m, K] -> [m, M]


def sent(
    way: Way, layer: int, experts: Experts, x_TM: Tensor, ids_TK: Tensor, weight_TK: Tensor, seats: "Seats"
) -> tuple[Tensor, dict[str, int]]:
    """Results of a layer's experts on a way, `[T, M]`, and the counts of its rows."""
    rows, weight_TK = way.rows(layer, ids_TK, weight_TK, seats)
    stands_n = way.stands(layer, rows, x_TM, weight_TK)
    fold = Fold.of(rows.copies, x_TM, weight_TK, stands_n, Chunks.whole(), medoid=way.medoid)
    remote_m1 = rows.remote_n[stands_n == torch.arange(len(stands_n))][:, None]
    x_mM = _arrived(fold.x).where(remote_m1, fold.x) if way.wire else fold.x
    there_mK = fold.copies.beside >= 0
    first_m1 = there_mK.int().argmax(1, keepdim=True)  # stands where no expert is asked, with weight 0
    ids_mK = fold.copies.beside.where(there_mK, fold.copies.beside.gather(1, first_m1)).to(ids_TK.dtype)
    y_mM = experts(x_mM, ids_mK, fold.weight.masked_fill(~there_mK, 0).to(weight_TK.dtype))
    if way.wire:
        y_mM = _arrived(y_mM).where(remote_m1, y_mM)
    return fold.spread(y_mM, len(x_TM)), rows.counted(stands_n)


@dataclass(frozen=True, slots=True, eq=False)
class Seats:
    """Devices of some tokens."""

    home: Tensor  #: The device of each, int64 `[T]`; -1: none of those that hold experts
    step: Tensor  #: Its step, int64 `[T]`
    shape: tuple[int, int]  #: Devices, and devices of a node
    devices: Callable[[int, Tensor], Tensor]  #: Of the experts of a layer, ids `[T, K]` to int64 `[T, K]`


def reach(way: Way, to: float) -> Way:
    """The way with its rule reaching as far as a distance or, of gates, an error."""
    if isinstance(way.cluster, Gate):
        return replace(way, cluster=replace(way.cluster, tau=to))
    assert isinstance(way.cluster, Star)
    return replace(way, cluster=Star(max(1 - to**2 / 2, -1.0)))


def as_int64(array: Ints) -> Tensor:
    """An array of integers as a tensor."""
    return torch.from_numpy(np.ascontiguousarray(array, np.int64))


class _Arrived(torch.autograd.Function):
    """Rows after their way to another device in fp8, as their gradients are after theirs."""

    @staticmethod
    def forward(_ctx: Any, x_mM: Tensor) -> Tensor:
        return decoded(encoded(x_mM), x_mM.dtype)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return decoded(encoded(grads[0]), grads[0].dtype)


def _arrived(x_mM: Tensor) -> Tensor:
    arrived_mM: Tensor = _Arrived.apply(x_mM)  # type: ignore[no-untyped-call]
    return arrived_mM
