"""A small model trained with rows that stand for others: held-out loss beside that of all rows, and rivals.

Seeds differ in initial weights and in the order of data. Devices are emulated in one process: a device's tokens are
condensed by themselves, and rows for its own experts are exact.
"""

import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult, Pool
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from moeplan.planner.demo.model import ModelConfig, MoELanguageModel
from moeplan.planner.demo.text import training_text
from moeplan.planner.strategies.luffy.folding import EXACT, Counted, Gate, Seats, Star, Way, reach, sent
from moeplan.runtime.condensation import first_tau, next_tau
from moeplan.runtime.decisions import CondensationDecision

from ..study import Row, Settings, Study
from ..train_demo import Recipe, held_out_loss, training

CONFIG = ModelConfig(num_layers=4, num_experts=8, hidden_size=64, ffn_size=64, num_heads=4, max_positions=128)
COPIES, ROWS = "copies", "1x4"
WARMUP = Recipe().warmup_steps
DROP = 0.4
HELD = 0.5, 0.75  # shares of the rows


@dataclass(frozen=True, slots=True)
class Method:
    """How a model is trained."""

    name: str
    way: Way = EXACT
    decision: CondensationDecision | None = None  #: Which rows stand for others; None: the way's
    experts: bool = True
    part: float = 1.0  #: Of the steps


NONE = Method("none")
NO_EXPERTS = Method("no experts", experts=False)
HALF_THE_STEPS = Method("half the steps", part=0.5)
DROPPED = Method(f"second experts below {DROP} dropped", Way("dropped", drop=DROP))
FP8 = Method("fp8 rows", Way("fp8", wire="fp8"))


def _gates(share: float) -> Method:
    decision = CondensationDecision(tau=0.2, schedule="share", target=share)
    return Method(f"gates, {share:.0%} held", decision=decision)


def _star(name: str, **fields: Any) -> Method:
    return Method(f"paper's {name}", decision=CondensationDecision(criterion="star", medoid=True, **fields))


GATES = [_gates(share) for share in HELD]
STARS = [_star(f"star, {share:.0%} held", threshold=0.9, schedule="share", target=share) for share in HELD]
PAPERS = [
    _star("star, cosine 0.8", threshold=0.8),
    _star("star, cosine 0.3", threshold=0.3),
    _star("Eq. 2 as printed", schedule="paper", h_max=0.5),
    _star("Eq. 2 from cosine 1", schedule="paper", h_max=1.0),
]


@dataclass(slots=True, eq=False)
class Rows:
    """The way that rows of a model go, and their counts."""

    devices: str
    way: Way = EXACT
    counted: Counted = field(default_factory=Counted)

    def sent(self, layer: int, experts: nn.Module, x_TM: Tensor, ids_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Results of a layer's experts."""
        length = CONFIG.max_positions - (not experts.training)  # the last byte of a held-out sample is only predicted
        sample_T = torch.arange(len(x_TM)) // length
        if self.devices == COPIES:  # an expert on each device, and tokens on none of these, so that every copy travels
            home_T, size, held = torch.full_like(sample_T, -1), CONFIG.num_experts, 1
        else:
            home_T, size, held = sample_T // 4, 4, CONFIG.num_experts // 4
        seats = Seats(home_T, torch.zeros_like(home_T), (size, size), lambda _layer, ids_TK: ids_TK // held)
        if self.way.drop:
            weight_TK = weight_TK.masked_fill(weight_TK < self.way.drop, 0)
            weight_TK = weight_TK / weight_TK.sum(1, keepdim=True)
        y_TM, counts = sent(self.way, layer, experts, x_TM, ids_TK, weight_TK, seats)
        self.counted.add(layer, counts)
        return y_TM


class Sent(nn.Module):
    """Experts of a layer behind the rows' way to them."""

    def __init__(self, layer: int, experts: nn.Module, rows: Rows) -> None:
        super().__init__()
        self.layer, self.experts, self.rows = layer, experts, rows

    def forward(self, x_TM: Tensor, ids_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """The weighted sum of each token's experts, `[T, M]`."""
        if self.rows.way == EXACT:
            y_TM: Tensor = self.experts(x_TM, ids_TK, weight_TK)
            return y_TM
        return self.rows.sent(self.layer, self.experts, x_TM, ids_TK, weight_TK)


class NoExperts(nn.Module):
    """Nothing in place of the experts of a layer."""

    def forward(self, x_TM: Tensor, _ids_TK: Tensor, _weight_TK: Tensor) -> Tensor:
        """Zeros."""
        return torch.zeros_like(x_TM)


@dataclass(frozen=True, slots=True)
class Trained:
    """A model after its training."""

    saved: float  #: Share of rows for other devices
    exact: float  #: Held-out bits per byte with exact experts
    as_trained: float  #: The same with rows that go the way they went last


# Devices, a method, and its runs, each beside that of the same seed with all rows
Run = AsyncResult[Trained]
Instance = tuple[str, str, list[tuple[Run, Run]]]


@cache
def _text() -> str:
    return training_text()


@cache
def _begun(devices: str, method: Method, seed: int, steps: int) -> Run:
    return _workers().apply_async(_trained, (devices, method, seed, steps))


@cache
def _workers() -> Pool:
    return get_context("spawn").Pool(2, signal.signal, (signal.SIGINT, signal.SIG_IGN))


def _trained(devices: str, method: Method, seed: int, steps: int) -> Trained:
    recipe = Recipe(seed=seed, steps=round(steps * method.part), warmup_steps=round(WARMUP * method.part))
    torch.manual_seed(seed)
    model, rows, decision = MoELanguageModel(CONFIG).train(), Rows(devices, method.way), method.decision
    for layer, block in enumerate(model.layers):
        moe = block.get_submodule("moe")
        moe.experts = Sent(layer, moe.get_submodule("experts"), rows) if method.experts else NoExperts()
    saved, first, tau = list[float](), 0.0, None
    if decision is not None:
        tau = first_tau(decision)
        rows.way = _way(decision, tau)
    for loss in training(model, _text(), recipe):
        saved.append(rows.counted.saved())
        rows.counted = Counted()
        if decision is not None:
            first = first or loss
            tau = next_tau(decision, tau, saved[-1], loss, first)
            rows.way = _way(decision, tau)
    way, rows.way = rows.way, EXACT
    exact = _bits(model)
    rows.way = way
    share = fmean(saved) if method.experts else 1.0
    return Trained(1 - method.part * (1 - share), exact, exact if way == EXACT else _bits(model))


def _way(decision: CondensationDecision, tau: float | None) -> Way:
    if not tau:
        return EXACT
    rule = Gate(tau) if decision.criterion == "gate" else Star(1.0)
    return reach(Way("condensed", rule, medoid=decision.medoid), tau)


def _bits(model: MoELanguageModel) -> float:
    return held_out_loss(model.eval()) / math.log(2)


def _instances(settings: Settings) -> list[Instance]:
    goals, others = [NONE, *GATES], [FP8, DROPPED, HALF_THE_STEPS, NO_EXPERTS, *STARS, *PAPERS]
    steps, most = (20, 1) if settings.quick else (400, 3)
    instances = list[Instance]()
    for devices in (ROWS, COPIES) if settings.full else (ROWS,):
        for method in goals if settings.quick else [*goals, *others]:
            seeds = range(most if settings.full or method in goals else 1)
            where = ROWS if method == NONE else devices  # the same anywhere
            runs = [(_begun(where, method, seed, steps), _begun(ROWS, NONE, seed, steps)) for seed in seeds]
            instances.append((devices, method.name, runs))
    return instances


def _rows(instance: Instance) -> Iterator[Row]:
    devices, name, begun = instance
    runs = [(run.get(), none.get().exact) for run, none in begun]
    above = [run.exact - none for run, none in runs]
    more = {"seeds": float(len(runs)), "bits": fmean(run.exact for run, _ in runs), "above none": fmean(above)}
    more |= {"from": min(above), "to": max(above)}
    more["above none, as trained"] = fmean(run.as_trained - none for run, none in runs)
    yield Row(devices, name, quality=fmean(run.saved for run, _ in runs), more=more)


STUDIES = (
    Study(
        title="Rows saved in training, and the loss after it",
        quality="rows saved, %",
        note="Held-out bits per byte after 400 steps, above those after 400 steps with all rows and the same seed. A"
        " model of 4 layers of 8 experts, top-2, hidden size 64, trained as the embedded one. On 1x4 each device has 4"
        " of a step's 16 samples of 128 bytes, and 2 experts, whose own rows are exact; as copies, each expert has a"
        " device of its own and no token is beside one (`--full`, which runs all seeds of all methods). Seeds differ in"
        " initial weights and in the order of data; from and to are the least and the greatest of theirs. Loss is with"
        " exact experts or, as trained, with rows condensed, coded or dropped as they were last. Held: one threshold"
        " for all layers moves after each step as in `moeplan.runtime`, so that so many rows are saved. fp8 rows take"
        " half of bf16's bytes, gradients too. Where second experts are dropped, the weight of the first is 1. Half the"
        " steps: half the warm-up, too.",
        instances=_instances,
        rows=_rows,
    ),
)
