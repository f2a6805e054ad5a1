"""LUFFY in training: rows that others stand for, fp8 rows and samples that move, beside every row as it is.

Rows are those of the embedded model's layers on text that it never saw, repeated to the width of a larger model in
bfloat16, with the experts and gates that they had there. What computes waits, but rows are compared and folded.

Legend: N tokens of all steps; T of a step; L layers; K experts per token; H hidden size of the embedded model; I
samples; S positions; D devices; n rows.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moeplan.planner.demo.model import load_embedded
from moeplan.planner.demo.text import other_text, record_text, samples
from moeplan.planner.replay.model import signs
from moeplan.planner.strategies.luffy.folding import EXACT, Gate, Seats, Star, Way
from moeplan.planner.strategies.luffy.measured import Judged, Measured, Step
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.encoded import SCALE_BYTES, decoded, encoded
from moeplan.runtime import parallelize
from moeplan.runtime.decisions import CondensationDecision, SamplePolicyDecision
from moeplan.runtime.engine.copies import select
from moeplan.runtime.expert_parallel import ExpertParallelModel
from moeplan.runtime.plan import Plan
from moeplan.solvers import contiguous
from moeplan.solvers.luffy import Attention, Law, first_homes, rehome
from moeplan.traces.recording.layers import moe_layers

from .calibration import Profile
from .case import Case, Figure
from .case import Measured as SecondsByWay
from .model import BACKWARD, BITS, EmulatedModel, Sizes, kind_of, train
from .network import linked
from .prediction import exchange_s
from .routing import Workload, plan_of
from .timing import Seconds, interleaved, ratio

Array = np.ndarray
LAYERS = (0, 2, 4)  # of the embedded model
LENGTH, SAMPLES, STEPS = 128, 8, 4  # tokens of a sample, samples of a rank, steps
REPEATS = 8  # of a row, side by side: distances stay
SMALL = 1e-6  # signs that spell kinds, beside elements of about 1
TAU, COSINE = 0.2, 0.8
METHOD = "joint"
NONE, HOMES = "every row", "luffy homes"
CONDENSED = {
    f"paper's star, cosine {COSINE}": Way("star", Star(COSINE), medoid=True),
    f"gates, tau {TAU}": Way("gates", Gate(TAU)),
    "fp8 rows": Way("fp8", wire="fp8"),
    f"fp8 rows and gates, tau {TAU}": Way("both", Gate(TAU), wire="fp8"),
}
RULES = {
    Star: CondensationDecision(criterion="star", threshold=COSINE, medoid=True),
    Gate: CondensationDecision(tau=TAU),
    type(None): None,
}


@dataclass(frozen=True, slots=True)
class Recorded:
    """Steps of the embedded model.

    Parameters
    ----------
    work
        The experts of every token, a kind each, and the tokens of all steps, `[steps I, S]`.
    rows, gates
        Inputs of the experts of every layer, bfloat16 `[N, H]`, and gate weights, `[N, K]`.
    judged
        By way: the loss on these steps, all layers of the embedded model going that way.
    """

    name: str
    work: Workload
    sizes: Sizes
    rows: list[Tensor]
    gates: list[Tensor]
    judged: dict[str, Judged]

    def row_bytes(self, way: str) -> int:
        """Bytes of a row between devices."""
        coded = CONDENSED.get(way, EXACT).wire is not None
        return self.sizes.hidden_size + SCALE_BYTES if coded else self.sizes.element_bytes * self.sizes.hidden_size


class _Rows(nn.Module):
    """The recorded rows of a layer in place of its norm."""

    def __init__(self, row_NH: Tensor) -> None:
        super().__init__()
        self.row = row_NH

    def forward(self, x: Tensor) -> Tensor:
        kind = kind_of(x)
        spelt = SMALL * signs(kind, BITS).to(x.dtype)
        return torch.cat([spelt, self.row[kind].repeat_interleave(REPEATS, -1)], dim=-1) + 0 * x[..., :1]


class Sent(NamedTuple):
    """Traffic of a layer: rows sent there and back, `[from, to]`, and the pairs that devices compute, `[D]`."""

    there: Array
    back: Array
    pairs: Array


def _prepare(cluster: Cluster) -> list[Recorded]:
    size = cluster.num_devices
    text_IS = torch.from_numpy(samples(f"{record_text()}\n\n{other_text()}", LENGTH))[: STEPS * SAMPLES * size]
    model, calls = load_embedded(), list[tuple[Tensor, ...]]()
    hooks = [layer.module.register_forward_pre_hook(lambda _m, args: calls.append(args)) for layer in moe_layers(model)]
    with torch.inference_mode():
        model(text_IS)
    for hook in hooks:
        hook.remove()
    rows, ids, gates = ([calls[layer][part].flatten(0, -2).clone() for layer in LAYERS] for part in range(3))
    work = Workload(
        torch.stack(ids, dim=1).numpy(), np.arange(text_IS.numel()).reshape(text_IS.shape), model.config.num_experts
    )
    sizes = Sizes(
        num_experts=work.num_experts,
        hidden_size=BITS + REPEATS * model.config.hidden_size,
        element_bytes=2,
        pair_s=2e-5,
        attention_s=1e-5,
    )
    home_T = torch.arange(size).repeat_interleave(SAMPLES * LENGTH)
    seats = _seats(home_T, cluster, work.num_experts)
    steps = [
        Step(tokens_IS, np.arange(len(tokens_IS)) + number * len(tokens_IS), seats)
        for number, tokens_IS in enumerate(text_IS.chunk(STEPS))
    ]
    whole = Measured(model, moe_layers(model), steps)
    judged = {way: whole.judge(how) for way, how in {NONE: EXACT, **CONDENSED}.items()}
    bf16 = [row_NH.to(torch.bfloat16) for row_NH in rows]
    return [Recorded(f"{cluster} embedded model", work, sizes, bf16, gates, judged)]


def _seats(home_T: Tensor, cluster: Cluster, num_experts: int) -> Seats:
    size = cluster.num_devices
    shape = size, cluster.devices_per_node
    return Seats(home_T, torch.zeros_like(home_T), shape, lambda _layer, ids_TK: ids_TK // (num_experts // size))


def _law(sizes: Sizes) -> Law:
    return Law(call_s=0.0, token_s=sizes.attention_s, square_s=0.0)


def _ways(cluster: Cluster, one: Recorded) -> dict[str, Plan]:
    placement = contiguous.solve(len(LAYERS), one.work.num_experts, cluster).placement
    policy = SamplePolicyDecision(method=METHOD, layers=tuple(range(len(LAYERS))), attention=_law(one.sizes))
    decided: dict[str, dict[str, Any]] = {
        NONE: {},
        **{name: {"condensation": RULES[type(way.cluster)], "wire": way.wire} for name, way in CONDENSED.items()},
        HOMES: {"sample_policy": policy},
    }
    cluster = linked(cluster)
    return {way: plan_of(cluster, one.work, one.sizes, placement, **more) for way, more in decided.items()}


def _run(cluster: Cluster, rank: int, _profile: Profile, given: list[Recorded], rounds: int) -> SecondsByWay:
    found: dict[str, Seconds] = {}
    for one in given:
        calls, alone, mine = {}, {}, inputs(rank, one, cluster)
        for way, model in models(cluster, one).items():
            calls[f"{one.name}/{way}"] = partial(_train_next, model, itertools.cycle(mine))
            alone[_alone(one, way)] = partial(_send_none, model, one, rank, mine[0][0].flatten())
        found |= interleaved(alone, rounds) | interleaved(calls, rounds)
    return found


def _alone(one: Recorded, way: str) -> str:
    return f"{one.name}/{way}, alone"


def _send_none(model: ExpertParallelModel, one: Recorded, rank: int, token_T: Tensor) -> None:
    """Compare, fold, encode and sum the rows of a step, and their gradients, all of which stay on this rank."""
    for number, (block, row_NH, gate_NK) in enumerate(zip(model.blocks, one.rows, one.gates, strict=True)):
        x_TM = _Rows(row_NH)(signs(token_T, BITS).float()).requires_grad_()
        ids_TK, weight_TK = torch.as_tensor(one.work.ids[token_T.numpy(), number]), gate_NK[token_T]
        device_TK, fold = block.placement.replicas.choose(ids_TK, token_T, token_T), None
        if block.condenser is not None:
            chunks, group = block.chunks, block.group
            fold = block.condenser.fold(x_TM, ids_TK, weight_TK, device_TK, chunks, group, training=True)
        copies = select(ids_TK, device_TK, None, (1, dist.get_world_size())) if fold is None else fold.copies
        x_mM = copies.hidden(x_TM, slice(None)) if fold is None else fold.x
        y_TM = copies.summed(x_mM, len(x_TM)) if fold is None else fold.spread(x_mM, len(x_TM))
        y_TM.backward(torch.ones_like(y_TM))  # type: ignore[no-untyped-call]
        remote_mM = x_mM.detach()[copies.place != rank]
        for _ in range(4 if block.wire else 0):  # there and back, forward and backward
            decoded(encoded(remote_mM), x_TM.dtype)


def models(cluster: Cluster, one: Recorded) -> dict[str, ExpertParallelModel]:
    """The model under the plan of every way, on a rank."""
    found, shared = {}, None
    for way, plan in _ways(cluster, one).items():
        model = EmulatedModel(one.work.ids, one.sizes).to(torch.bfloat16)
        shared = model.embed.table if shared is None else shared
        model.embed.table = shared
        for layer, row_NH, gate_NK in zip(model.layers, one.rows, one.gates, strict=True):
            layer.moe_norm = _Rows(row_NH)
            layer.get_submodule("moe.router").weight = gate_NK
        found[way] = parallelize(model, plan)
    return found


def inputs(rank: int, one: Recorded, cluster: Cluster) -> list[tuple[Tensor, Tensor]]:
    """The tokens and the sample ids of a rank, a step each."""
    numbers = torch.arange(SAMPLES) + rank * SAMPLES
    mine = [np.split(tokens_IS, cluster.num_devices)[rank] for tokens_IS in np.split(one.work.tokens, STEPS)]
    return [(torch.as_tensor(tokens_IS), numbers) for tokens_IS in mine]


def _train_next(model: nn.Module, steps: Iterator[tuple[Tensor, Tensor]]) -> None:
    train(model, *next(steps))


def _told(cluster: Cluster, profile: Profile, given: list[Recorded], measured: SecondsByWay) -> list[Figure]:
    figures = []
    for one in given:
        first, exact, every = measured[f"{one.name}/{NONE}"], one.judged[NONE], 1.0
        for way in (NONE, *CONDENSED, HOMES):
            seconds, steps = measured[f"{one.name}/{way}"], [sent(cluster, one, way, number) for number in range(STEPS)]
            rounds = np.arange(1, 1 + len(seconds.samples)) % STEPS  # the first step is that of the call not timed
            alone_s = measured[_alone(one, way)].median
            predicted = [alone_s + _seconds(cluster, profile, one, way, steps[number]) for number in rounds]
            rows = sum(float(layer.there.sum() + layer.back.sum()) for step in steps for layer in step)
            every = rows if way == NONE else every
            told = {"rows saved, %": 1 - rows / every}
            if way in one.judged:
                bits, low, high = one.judged[way].rise(exact, 0)
                told |= {"bits": bits, "bits from": low, "bits to": high}
            figures.append(Figure(one.name, way, seconds, float(np.median(predicted)), ratio(first, seconds), told))
    return figures


def sent(cluster: Cluster, one: Recorded, way: str, number: int) -> list[Sent]:
    """Traffic of the layers of a step under a way."""
    size, found = cluster.num_devices, list[Sent]()
    part = slice(number * size * SAMPLES * LENGTH, (number + 1) * size * SAMPLES * LENGTH)
    home_I = np.arange(size).repeat(SAMPLES)
    length_I = np.full(len(home_I), LENGTH)
    attention = Attention(_law(one.sizes), length_I, length_I**2, follows=False)  # nothing predicts the next layer
    if way == HOMES:
        home_I = first_homes(METHOD, Attention(attention.law, length_I, length_I**2), home_I, size)
    how = CONDENSED.get(way, EXACT)
    for layer, (row_NH, gate_NK) in enumerate(zip(one.rows, one.gates, strict=True)):
        ids_TK = torch.as_tensor(one.work.ids[part, layer])
        home_T = torch.from_numpy(home_I.repeat(LENGTH))
        rows, weight_TK = how.rows(layer, ids_TK, gate_NK[part], _seats(home_T, cluster, one.work.num_experts))
        x_TM = _Rows(row_NH)(signs(torch.arange(part.start, part.stop), BITS).float())
        stands_n = how.stands(layer, rows, x_TM, weight_TK)
        kept_n = (stands_n == torch.arange(len(stands_n))).numpy()
        to_n, token_n = (rows.copies.place % size).numpy(), rows.copies.row.numpy()
        asked_n = (rows.copies.beside >= 0).sum(1).numpy()
        next_I = home_I
        if way == HOMES:
            copies_ID = np.zeros((len(home_I), size), np.int64)
            np.add.at(copies_ID, (token_n // LENGTH, to_n), 1)
            pairs_I = length_I * ids_TK.shape[1]
            next_I = rehome(
                METHOD, copies_ID, pairs_I, linked(cluster), attention, copy_bytes=one.row_bytes(way), bounded=False
            ).device_of_sample
        there, back = np.zeros((2, size, size))
        np.add.at(there, (home_I[token_n[kept_n] // LENGTH], to_n[kept_n]), 1)
        np.add.at(back, (to_n[kept_n], next_I[token_n[kept_n] // LENGTH]), 1)
        for flow in (there, back):
            np.fill_diagonal(flow, 0)
        found.append(Sent(there, back, np.bincount(to_n[kept_n], weights=asked_n[kept_n], minlength=size)))
        home_I = next_I
    return found


def _seconds(cluster: Cluster, profile: Profile, one: Recorded, way: str, layers: list[Sent]) -> float:
    """Seconds of a step, forward and backward, beside those that its rows take where they are."""
    total = 0.0
    for layer in layers:
        exchanges = sum(exchange_s(profile, cluster, one.row_bytes(way) * flow) for flow in (layer.there, layer.back))
        experts_s = float(profile.wait.seconds(one.sizes.start_s + one.sizes.pair_s * layer.pairs.max()))
        total += one.sizes.attention_s * SAMPLES * LENGTH + (1 + 2 * (way == HOMES)) * profile.call_s
        total += 2 * exchanges + (1 + BACKWARD) * experts_s
    return total


CONDENSING = Case(_prepare, _run, _told)
