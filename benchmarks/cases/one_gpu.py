"""The devices of a plan, one after another on one GPU: seconds measured beside those that a preset predicts.

Experts run on the rows that tokens held out bring to each device; no exchange runs. The plan is made from half of
the sequences of gpt-oss-20b, the tokens are of the other half.

Legend: T tokens; L MoE layers; K experts per token; D devices; S slots of a device; P token-expert pairs of a device;
E experts; M hidden size; H expert FFN size; B sequences; A heads; C elements of a head.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moeplan.errors import UsageError
from moeplan.planner.evaluate.costs import CostModel
from moeplan.planner.request import Request
from moeplan.planner.solve import make
from moeplan.profilers.description import on_cluster
from moeplan.profilers.presets import PRESETS, load_preset
from moeplan.profilers.profile import Profile, save
from moeplan.profilers.routed import grouped, looped
from moeplan.profilers.sampling import Clock, clock_for
from moeplan.solvers.placement import Placement
from moeplan.traces.examples import EXAMPLES
from moeplan.traces.importers import import_trace

from ..routing import GPT_OSS, Array
from ..study import Row, Settings, Study

MODEL = EXAMPLES["gpt-oss-20b"]
HIDDEN, FFN, KV, HEADS, KV_HEADS = 2880, 2880, 1024, 64, 8
WARM_UPS, CALLS = 2, 7
STEPS = 2  # of tokens held out
DTYPE = torch.bfloat16
Instance = tuple[Path, str, int, int]  # data, cluster, replicas, tokens per step
Products = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # rows by expert, their ends, weights -> outputs
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _instances(settings: Settings) -> list[Instance]:
    cases = (("2x8", 32, 16_384), ("1x8", 8, 16_384), ("1x8", 8, 1024))
    return [(settings.data / GPT_OSS, *case) for case in cases[: 1 if settings.quick else None]]


def _rows(instance: Instance) -> Iterator[Row]:
    """Today and the plan under either kernel; ratios are of today's measured seconds."""
    source, size, redundant, tokens = instance
    with np.load(source) as arrays:
        routing = {name: arrays[name] for name in ("expert_ids", "weights", "seq_id", "pos")}
    even_T = routing["seq_id"] % 2 == 0
    preset = _preset()
    profile = on_cluster(preset, size, ["inter=50:5"] if not size.startswith("1x") else [])
    plan = _plan(routing, even_T, profile, redundant, tokens)
    today = _today(profile.cluster.num_devices)
    steps = routing["expert_ids"][~even_T][: STEPS * tokens].reshape(STEPS, tokens, *routing["expert_ids"].shape[1:])
    costs = CostModel.of(profile, profile.cluster, MODEL, samples=True)
    assert costs is not None
    assert costs.experts is not None
    for name, kernel in KERNELS.items():
        measured_s = dict[str, float]()
        for method, placement in (("today", today), ("plan", plan)):
            loads = [_rows_of_slots(step, placement) for step in steps]  # by step, layer, device: rows of each slot
            seconds = np.array([[[_experts_s(kernel, rows) for rows in layer] for layer in step] for step in loads])
            pairs = np.array([[[sum(rows) for rows in layer] for layer in step] for step in loads], np.float64)
            held = np.array([len(rows) for rows in loads[0][0]], np.float64)
            predicted_s = np.asarray(costs.experts(pairs, np.broadcast_to(held, pairs.shape)).seconds)
            whole, expected = (float(one.max(axis=2).sum(axis=1).mean()) for one in (seconds, predicted_s))
            measured_s[method] = whole
            busiest = float((pairs.max(axis=2) / pairs.mean(axis=2)).mean())
            more = {"prediction over measured, %": expected / whole - 1, "balance": busiest}
            instance_name = f"{size}, {tokens:,} tokens, {name}"
            ratio = measured_s["today"] / whole
            yield Row(instance_name, method, quality=expected, seconds=whole, ratio=ratio, more=more)


def _plan(routing: dict[str, Array], even_T: Array, profile: Profile, redundant: int, tokens: int) -> Placement:
    """The placement by eplb for one half of the sequences."""
    with tempfile.TemporaryDirectory() as folder:
        half, trace, hardware = (Path(folder) / name for name in ("half.npz", "trace", "profile.json"))
        np.savez(half, num_experts=MODEL.num_experts, **{name: column[even_T] for name, column in routing.items()})
        import_trace(half, trace, hidden_size=HIDDEN, ffn_size=FFN, dtype_bytes=2)
        save(profile, hardware)
        request = Request.of(
            strategy="eplb",
            trace=str(trace),
            cluster=profile.cluster,
            profile=hardware,
            redundant=redundant,
            tokens_per_step=tokens,
        )
        decision = make(request).plan.decisions.placement
        assert decision is not None
        return decision.placement(MODEL, profile.cluster)


def _today(num_devices: int) -> Placement:
    """Experts in order, each once."""
    table_LP = np.tile(np.arange(MODEL.num_experts, dtype=np.int32), (MODEL.num_layers, 1))
    slots_D = np.full(num_devices, MODEL.num_experts // num_devices, np.int64)
    return Placement(table_LP, slots_D, MODEL.num_experts)


def _rows_of_slots(ids_TLK: Array, placement: Placement) -> list[list[list[int]]]:
    """The rows of each slot, by layer and device; those of an expert are shared evenly among its slots."""
    ends = np.cumsum(placement.slots)
    layers = []
    for layer, table_P in enumerate(placement.physical_to_logical):
        count_E = np.bincount(ids_TLK[:, layer].ravel(), minlength=MODEL.num_experts)
        row_P = np.zeros(len(table_P), np.int64)
        for expert, count in enumerate(count_E):
            slots = np.flatnonzero(table_P == expert)
            row_P[slots] = [len(part) for part in np.array_split(np.arange(count), len(slots))]
        layers.append([part.tolist() for part in np.split(row_P, ends[:-1])])
    return layers


def _experts_s(kernel: Kernel, rows: Sequence[int]) -> float:
    """The median seconds of one device's experts on so many rows each."""
    x_PM, w_in, w_out = _hidden()[: sum(rows)], *_weights()
    sizes_S = torch.tensor(rows, device="cuda")
    return _seconds(lambda: kernel(x_PM, sizes_S, w_in[: len(rows)], w_out[: len(rows)]))


def _routed(products: Products, x_PM: Tensor, sizes_S: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """Experts with the gather and the weighting of `moeplan.runtime`."""
    slot_P1 = torch.arange(len(sizes_S), device="cuda").repeat_interleave(sizes_S)[:, None]
    order_P = slot_P1.flatten().argsort(stable=True)
    y_PM = products(x_PM[order_P], sizes_S.cumsum(0).int(), w_in, w_out)[order_P.argsort()]
    return torch.ones_like(slot_P1, dtype=DTYPE) * y_PM


KERNELS: dict[str, Kernel] = {
    "one expert after another": partial(_routed, looped),
    "grouped product": lambda x_PM, sizes_S, w_in, w_out: grouped(x_PM, sizes_S.cumsum(0).int(), w_in, w_out),
    "the runtime's": partial(_routed, grouped),
}


def _attention_rows(shape: tuple[int, int, int]) -> Iterator[Row]:
    """Measured, beside the preset's roofline."""
    batch, length, queries = shape
    preset = _preset()
    costs = CostModel.of(preset, preset.cluster, MODEL, samples=True, queries=queries)
    assert costs is not None
    assert costs.attention is not None
    # as many sequences of that length as have the tokens that are computed
    predicted = costs.attention(np.array([batch * queries / length]), np.array([float(length)]), np.ones(1))
    expected, measured = float(predicted.seconds[0]), _attention_s(batch, length, queries)
    kind = f"{batch} x {length:,} tokens" if queries == length else f"{batch} tokens, contexts of {length:,}"
    more = {"prediction over measured, %": expected / measured - 1}
    yield Row(kind, "attention", quality=expected, seconds=measured, more=more)


def _attention_s(batch: int, length: int, queries: int) -> float:
    """The seconds of projections and attention, of `queries` tokens of each sequence."""
    size = KV // 2 // KV_HEADS
    x = _drawn(batch, queries, HIDDEN)
    w_q, w_kv, w_out = (
        _drawn(*shape) * HIDDEN**-0.5 for shape in ((HIDDEN, HEADS * size), (HIDDEN, KV), (HEADS * size, HIDDEN))
    )
    context = [_drawn(batch, KV_HEADS, length, size) for _ in range(2)]

    def call() -> Tensor:
        q = (x @ w_q).view(batch, queries, HEADS, size).transpose(1, 2)
        k, v = (x @ w_kv).view(batch, queries, 2, KV_HEADS, size).permute(2, 0, 3, 1, 4)
        whole = queries == length
        if not whole:
            k, v = context
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=whole, enable_gqa=True)
        out: Tensor = y.transpose(1, 2).flatten(-2) @ w_out
        return out

    return _seconds(call)


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def _seconds(call: Callable[[], Any]) -> float:
    clock = _clock()
    with torch.inference_mode():
        return median([clock.time(call) for _ in range(WARM_UPS + CALLS)][WARM_UPS:])


@cache
def _clock() -> Clock:
    return clock_for("cuda:0")


@cache
def _hidden() -> Tensor:
    return _drawn(65_536, HIDDEN)


@cache
def _weights() -> tuple[Tensor, Tensor]:
    """Of more experts than a device holds."""
    return _drawn(16, 2 * FFN, HIDDEN) * HIDDEN**-0.5, _drawn(16, HIDDEN, FFN) * FFN**-0.5


@cache
def _preset() -> Profile:
    """Preset of the GPU that is here.

    Raises
    ------
    UsageError
        There is none, or no preset of it ships.
    """
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    name = next((name for name in PRESETS if name.partition("_")[0].upper() in here), None)
    if name is None:
        raise UsageError(f"found {here}; expected a GPU of {', '.join(PRESETS)}")
    return load_preset(name)


def _attentions(settings: Settings) -> list[tuple[int, int, int]]:
    shapes = [(4, 512, 512), (4, 1024, 1024), (4, 4096, 4096), (64, 1024, 1), (64, 4096, 1)]
    return shapes[: 2 if settings.quick else None]


STUDIES = (
    Study(
        title="Experts of gpt-oss-20b, the devices of a step one after another",
        quality="predicted, s",
        baseline="today",
        note="Seconds of all layers, the slowest device of each, mean over two steps of tokens held out. bf16; the plan"
        " is eplb's with replicas. Predicted: the preset's curve of fused kernels. The runtime's: a grouped"
        " product, its gather and its weighting; one expert after another has these, too. Balance: most rows of a"
        " device over the mean, mean over layers.",
        instances=_instances,
        rows=_rows,
        needs=GPT_OSS,
    ),
    Study(
        title="Attention of gpt-oss-20b's size",
        quality="predicted, s",
        note="One layer: projections and scaled_dot_product_attention, beside the preset's roofline. 64 heads of"
        " queries, 8 of keys and values. Of one token per sequence, scaled_dot_product_attention is not what engines"
        " run.",
        instances=_attentions,
        rows=_attention_rows,
    ),
)
