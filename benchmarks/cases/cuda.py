"""The runtime on one GPU: its experts and its own cost, chunks, condensation, attention, moves, and measuring.

One rank over NCCL sends to itself. What needs several ranks shares the GPU and goes through the host (gloo); it says
so.

Legend: T tokens; P token-expert pairs; E experts; K experts per token; M hidden size; H expert FFN size; D devices.
"""

import copy
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moeplan.errors import UsageError
from moeplan.planner.demo.model import Attention, ModelConfig, Router
from moeplan.profilers.attended import attended
from moeplan.profilers.cases import CASES
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.fits.laws import least_relative
from moeplan.profilers.measure import measure
from moeplan.profilers.predictor import predict
from moeplan.profilers.routed import grouped, looped, partial_sums, weighted_experts
from moeplan.profilers.sampling import Clock, clock_for
from moeplan.profilers.world import World, run_world
from moeplan.runtime import parallelize
from moeplan.runtime.decisions import Decisions, PipelineDecision
from moeplan.runtime.engine import condenser
from moeplan.runtime.engine.chunks import Chunks
from moeplan.runtime.engine.condenser import standing
from moeplan.runtime.engine.copies import select
from moeplan.runtime.engine.fold import Fold
from moeplan.runtime.engine.layer import ParallelExperts, rebind
from moeplan.runtime.engine.layer_placement import LayerPlacement
from moeplan.runtime.plan import Inputs, Plan
from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.traces.model import ModelSpec

from ..study import Row, Settings, Study

DEVICE, DTYPE = "cuda:0", torch.bfloat16
WARM_UPS, CALLS = 3, 21
PASSES = ("forward", "forward and backward")
TOP_K = 2
Sizes = tuple[int, int, int, int]  # tokens, experts, hidden, FFN


class GatedExperts(nn.Module):
    """Experts with gate above up, as the case `routed_block` has them."""

    def __init__(self, experts: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(_drawn(experts, 2 * ffn, hidden) * hidden**-0.5)
        self.w_out = nn.Parameter(_drawn(experts, hidden, ffn) * ffn**-0.5)

    def forward(self, x_TM: Tensor, ids_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """The weighted sum of each token's experts, `[T, M]`."""
        return weighted_experts(x_TM, ids_TK, weight_TK, self.w_in, self.w_out)


class Block(nn.Module):
    """A router beside experts."""

    def __init__(self, experts: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.router = Router(_config(hidden, num_experts=experts)).to(DEVICE, DTYPE).eval()
        self.experts: nn.Module = GatedExperts(experts, hidden, ffn)

    def forward(self, x_TM: Tensor) -> Tensor:
        """`[T, M]` to `[T, M]`."""
        weight_TK, ids_TK = self.router(x_TM)
        y_TM: Tensor = self.experts(x_TM, ids_TK, weight_TK.to(x_TM.dtype))
        return y_TM


# Products


def _products(sizes: Sizes) -> Iterator[Row]:
    """Experts alone, one after another and in a grouped product."""
    pairs, experts, hidden, ffn = sizes
    x, held = _drawn(pairs, hidden), GatedExperts(experts, hidden, ffn)
    end_E = torch.arange(1, experts + 1, device=DEVICE).mul(pairs).div(experts, rounding_mode="floor").int()
    floor_s = _product_s()
    for kind in PASSES:
        taken = dict[str, float]()
        work = 3 * pairs * hidden * ffn * (3 if kind != "forward" else 1)
        for name, products in (("one expert after another", looped), ("grouped product", grouped)):

            def call(products: Callable[..., Tensor] = products) -> Tensor:
                return products(x, end_E, held.w_in, held.w_out)

            taken[name] = _seconds(call, [x, *held.parameters()], kind)
            yield Row(
                f"{_named(sizes)}, {kind}",
                name,
                quality=work * floor_s / taken[name],
                seconds=taken[name],
                ratio=taken["one expert after another"] / taken[name],
            )


# The block


def _blocks(sizes: Sizes) -> list[Row]:
    return _of_one_rank(_block_rows, sizes)


def _block_rows(_world: World, sizes: Sizes) -> list[Row]:
    """A routed block of the runtime beside its experts alone and the profiler's case."""
    tokens, experts, hidden, ffn = sizes
    torch.manual_seed(0)
    x, block, rows = _drawn(tokens, hidden).requires_grad_(), Block(experts, hidden, ffn), list[Row]()
    with torch.no_grad():
        weight_TK, ids_TK = block.router(x)
    held, case, seconds = block.experts, CASES["routed_block"], dict[str, dict[str, float]]()

    def timed(name: str, call: Callable[[], Tensor], module: nn.Module) -> None:
        seconds[name] = {kind: _seconds(call, [x, *module.parameters()], kind) for kind in PASSES}

    timed("experts alone", lambda: partial_sums(held, x, ids_TK, weight_TK)[0], held)
    timed("block without a plan", lambda: block(x), block)
    for name, chunks in (("block under a plan", 1), ("block in two chunks", 2)):
        pipeline = PipelineDecision(forward=(chunks,), backward=(chunks,))
        spread = parallelize(copy.deepcopy(block), _plan(experts, pipeline=pipeline))
        timed(name, functools.partial(spread.model, x), spread)
    inputs = case.prepare(_size(TOP_K * tokens, experts, hidden, ffn), "bf16", _here())
    seconds["profile's routed_block"] = {"forward": _seconds(functools.partial(case.run, inputs), [], "forward")}
    for kind in PASSES:
        alone_s = seconds["experts alone"][kind]
        for name, of in seconds.items():
            if kind in of:
                more = {"beyond experts, s": of[kind] - alone_s}
                where = f"{_named(sizes)}, {kind}"
                rows.append(Row(where, name, seconds=of[kind], ratio=alone_s / of[kind], more=more))
    return rows


def _degrees(sizes: Sizes) -> list[Row]:
    return _of_one_rank(_degree_rows, sizes)


def _degree_rows(_world: World, sizes: Sizes) -> list[Row]:
    """Degrees of a pipeline in one rank, whose exchanges are copies on NCCL's stream."""
    tokens, experts, hidden, ffn = sizes
    torch.manual_seed(0)
    x, block, taken, rows = _drawn(tokens, hidden).requires_grad_(), Block(experts, hidden, ffn), dict[Any, float](), []
    sent, arrived = _drawn(tokens, hidden), _drawn(tokens, hidden)
    exchange_s = _seconds(lambda: dist.all_to_all_single(arrived, sent), [], "forward")
    for kind, exchanges in zip(PASSES, (2, 4), strict=True):
        for degree in (1, 2, 4, 8):
            pipeline = PipelineDecision(forward=(degree,), backward=(degree,))
            spread = parallelize(copy.deepcopy(block), _plan(experts, pipeline=pipeline))
            taken[kind, degree] = _seconds(functools.partial(spread.model, x), [x, *spread.parameters()], kind)
            rows.append(
                Row(
                    f"{_named(sizes)}, {kind}",
                    f"degree {degree}",
                    seconds=taken[kind, degree],
                    ratio=taken[kind, 1] / taken[kind, degree],
                    more={"its exchanges alone, s": exchanges * exchange_s},
                )
            )
    return rows


def _of_one_rank(target: Callable[[World, Any], list[Row]], sizes: Sizes) -> list[Row]:
    """Rows of one rank over NCCL."""
    found = run_world(1, target, sizes, device="cuda", timeout_s=300)
    assert found is not None
    rows: list[Row] = found[0]
    return rows


# Condensation


def _condensed(sizes: Sizes) -> Iterator[Row]:
    """The parts of a condensation of one rank of four, in shares of an expert pass of as many tokens."""
    tokens, experts, hidden, ffn = sizes
    held, num_devices = GatedExperts(experts, hidden, ffn), 4
    topic_T = torch.randint(tokens // 3, (tokens,), device=DEVICE)
    x = (_drawn(tokens // 3, hidden)[topic_T] + 0.3 * _drawn(tokens, hidden)).requires_grad_()
    ids_TK = torch.rand(tokens // 3, experts, device=DEVICE).argsort(1)[topic_T, :TOP_K]
    weight_TK = torch.rand(tokens, TOP_K, device=DEVICE).add(1).to(DTYPE)
    weight_TK = (weight_TK / weight_TK.sum(1, keepdim=True)).requires_grad_()
    device_TK = ids_TK // (experts // num_devices)
    copies = select(ids_TK, device_TK, None, (1, num_devices))
    rows = int(copies.counts[0, 1:].sum())
    passes = {kind: _seconds(lambda: held(x, ids_TK, weight_TK), [x, *held.parameters()], kind) for kind in PASSES}
    for kind in PASSES:
        yield Row(f"{_named(sizes)}, {kind}", "expert pass", quality=1.0, seconds=passes[kind])
    for cover, reach in (("gate", 0.22), ("star", 0.45)):
        remote_n = copies.place != 0
        stands = functools.partial(standing, copies, x, weight_TK, remote_n, reach, cosine=cover == "star")
        stands_n = stands()
        saved = float((stands_n != torch.arange(len(stands_n), device=DEVICE)).sum()) / rows
        cover_s = _seconds(stands, [], "forward")
        with mock.patch.multiple(condenser, priority=_itself, star=_itself):  # no choice among rows that are near
            found_s = _seconds(stands, [], "forward")
        for kind in PASSES:
            fold_s = _seconds(functools.partial(_folded, copies, x, weight_TK, stands_n, tokens), [x, weight_TK], kind)
            bare_s = _seconds(lambda: copies.summed(copies.hidden(x, slice(None)), tokens), [x], kind)
            for name, seconds in (("cover", cover_s), ("fold and spread", fold_s - bare_s)):
                more = {"copies saved, %": saved, "choice among near rows, s": cover_s - found_s}
                yield Row(
                    f"{_named(sizes)}, {kind}",
                    f"{cover}: {name}",
                    quality=seconds / passes[kind],
                    seconds=seconds,
                    more=more if name == "cover" else {},
                )


def _folded(copies: Any, x: Tensor, weight_TK: Tensor, stands_n: Tensor, tokens: int) -> Tensor:
    fold = Fold.of(copies, x, weight_TK, stands_n, Chunks.whole(), medoid=False)
    return fold.spread(fold.x + 0 * fold.weight.sum(1, keepdim=True), tokens)


def _itself(serves_Bww: Tensor) -> Tensor:
    return torch.arange(serves_Bww.shape[1], device=serves_Bww.device).expand(serves_Bww.shape[:2])


# Attention

TERMS = (  # of the law, in the unit of a column
    ("a start, s", 1.0),
    ("a call, s", 1.0),
    ("a token, ns", 1e9),
    ("a token squared, ps", 1e12),
    ("a sample, s", 1.0),
)


def _attention(hidden: int) -> Iterator[Row]:
    """Held-out error of LUFFY's law on the runtime's own attention, and of the law that a profile's case gives."""
    config = _config(hidden, num_heads=hidden // 64, num_kv_heads=8)
    attention, rng = Attention(config).to(DEVICE, DTYPE).eval(), np.random.default_rng(0)
    lengths = (64, 128, 256, 512, 1024, 2048, 4096)
    equal = [[length] * number for number in (1, 4, 16) for length in lengths if number * length <= 2**15]
    mixed = [np.exp(rng.uniform(np.log(64), np.log(4096), number)).astype(int).tolist() for number in (2, 4, 8, 16) * 5]
    every = equal + mixed
    terms = np.array([[1, len({*one}), sum(one), sum(n**2 for n in one), len(one)] for one in every], float)
    taken = np.array([_attended_s(attention, one) for one in every])
    folds = np.arange(len(every)) % 5
    laws = {
        "token, square, call and start": [0, 1, 2, 3],
        "token, square and call": [1, 2, 3],
        "token and square": [2, 3],
        "with seconds a sample": [0, 1, 2, 3, 4],
    }
    for name, columns in laws.items():
        error = np.zeros(len(every))
        for fold in range(5):
            law = np.array(least_relative(terms[folds != fold][:, columns], taken[folds != fold]))
            error[folds == fold] = np.abs(terms[folds == fold][:, columns] @ law / taken[folds == fold] - 1)
        law = np.array(least_relative(terms[:, columns], taken))
        fitted = dict(zip(columns, law.tolist(), strict=True))
        more = {TERMS[column][0]: value * TERMS[column][1] for column, value in fitted.items()}
        yield from _errors(f"{name}: held out", error, len(equal), more)
    case, measured = CASES["attention"], list[float]()
    sizes = [(one[0], len(one), calls) for one in equal for calls in sorted({1, len(one)})]
    for length, batch, calls in sizes:
        size = {"length": length, "batch": batch, "hidden": hidden, "calls": calls}
        inputs = case.prepare(size, "bf16", _here())
        measured.append(_seconds(functools.partial(case.run, inputs), [], "forward"))
    of_case = np.array([[1, calls, batch * length, batch * length**2] for length, batch, calls in sizes], float)
    law = np.array(least_relative(of_case, np.array(measured)))
    more = {name: value * unit for (name, unit), value in zip(TERMS[:4], law.tolist(), strict=True)}
    yield from _errors("of the profile's case", np.abs(terms[:, :4] @ law / taken - 1), len(equal), more)


def _errors(name: str, error: np.ndarray, equal: int, more: dict[str, float]) -> Iterator[Row]:
    for kind, of in (("equal lengths", slice(0, equal)), ("mixed lengths", slice(equal, None))):
        yield Row(kind, name, quality=float(error[of].mean()), more=more)


def _attended_s(attention: Attention, lengths: Sequence[int]) -> float:
    x = _drawn(sum(lengths), attention.config.hidden_size)
    position = torch.cat([torch.arange(length, device=DEVICE) for length in lengths])
    return _seconds(lambda: attended(attention, x, position, lengths), [], "forward")


# Moves


def _moves(layers: int) -> Iterator[Row]:
    """Experts of 2 x 2880 x 2880 that change owners with AdamW's state."""
    found = run_world(2, _moving, layers, timeout_s=300)
    assert found is not None
    seconds, moved_bytes = found[0]
    yield Row(
        f"{layers} experts",
        "rebind",
        quality=seconds / layers,
        seconds=seconds,
        more={"MB a rank sends": moved_bytes / 1e6, "GB/s": moved_bytes / seconds / 1e9},
    )


def _moving(world: World, layers: int) -> tuple[float, int]:
    """Seconds of one rebinding, and the bytes that this rank sends, of parameters and two states."""
    tables = [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    places = [
        LayerPlacement.of(
            Placement.from_sets([table], 4, ReplicaRule.QUOTA),
            0,
            devices_per_node=2,
            group=None,
            device=DEVICE,
            counted=True,
        )
        for table in tables
    ]
    blocks = []
    for _ in range(layers):
        experts = nn.Module()
        experts.w_in, experts.w_out = (nn.Parameter(_drawn(2, 2880, 2880)) for _ in range(2))
        blocks.append(ParallelExperts(experts, places[0], None))
    optimizer = torch.optim.AdamW([own for block in blocks for own in block.parameters()])
    for block in blocks:
        for own in block.parameters():
            own.grad = torch.zeros_like(own)
    optimizer.step()
    optimizer.zero_grad()
    times = []
    for turn in range(1, 8):
        torch.cuda.synchronize()
        dist.barrier()
        started = time.perf_counter()
        rebind([(block, places[turn % 2]) for block in blocks], optimizer)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    one_bytes = 3 * 2 * 2880 * 2880 * DTYPE.itemsize
    return median(times[2:]), layers * one_bytes


# The profile


def _profiles(grid: Any) -> Iterator[Row]:
    """`moeplan profile` here, and its predictions of blocks at sizes that are not on its grid."""
    started = time.perf_counter()
    profile = measure(device="cuda", grid=grid)
    assert profile is not None
    seconds = time.perf_counter() - started
    for key, series in profile.series.items():
        error = None if series.fit is None else series.fit.held_out[series.fit.model.kind].median_error
        yield Row(
            f"{grid}, {seconds:.0f} s",
            key,
            quality=error,
            more={"sizes": len(series.measurements), "missing": 0.0 if profile.complete else 1.0},
        )
    case = CASES["routed_block"]
    for tokens, experts, hidden, ffn in ((3000, 16, 2880, 2880), (12_000, 4, 2880, 2880), (700, 8, 1536, 1024)):
        size = _size(tokens, experts, hidden, ffn)
        expected = float(predict(profile, "routed_block", size, dtype="bf16").seconds)
        inputs = case.prepare(size, "bf16", _here())
        measured = _seconds(functools.partial(case.run, inputs), [], "forward")
        yield Row(
            f"{grid}, {seconds:.0f} s",
            f"routed_block, {_named((tokens, experts, hidden, ffn))}",
            seconds=measured,
            more={"predicted, s": expected, "prediction over measured, %": expected / measured - 1},
        )


# What all share


def _plan(num_experts: int, **decisions: Any) -> Plan:
    """A plan of one device that decides nothing else."""
    spec = ModelSpec(name="block", layer_ids=(0,), num_experts=num_experts, top_k=TOP_K)
    return Plan.make(
        strategies=(),
        seed=0,
        cluster=Cluster(1, 1),
        model=spec,
        inputs=Inputs(),
        decisions=Decisions(**decisions),
        options={},
        verdict=None,
    )


def _config(hidden: int, **sizes: int) -> ModelConfig:
    known = {"vocab_size": 8, "num_layers": 1, "num_experts": 8, "top_k": TOP_K, "ffn_size": 8, "max_positions": 4096}
    return ModelConfig(**{**known, "num_heads": 8, "num_kv_heads": 8, "hidden_size": hidden, **sizes})


def _here() -> World:
    return World(0, 1, DEVICE, ("here",), print)


def _size(tokens: int, experts: int, hidden: int, ffn: int) -> dict[str, int]:
    return {"tokens": tokens, "experts": experts, "hidden": hidden, "ffn": ffn}


def _named(sizes: Sizes) -> str:
    tokens, experts, hidden, ffn = sizes
    return f"{tokens:,} tokens, {experts} experts of {hidden:,} x {ffn:,}"


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def _seconds(call: Callable[[], Any], inputs: Sequence[Tensor], kind: str) -> float:
    """The median seconds of a call or, with its backward pass, by these inputs."""
    clock, run = _clock(), _passes(call, inputs, kind)
    return median([clock.time(run) for _ in range(WARM_UPS + CALLS)][WARM_UPS:])


def _passes(call: Callable[[], Any], inputs: Sequence[Tensor], kind: str) -> Callable[[], Any]:
    trained = [tensor for tensor in inputs if tensor.requires_grad]
    if kind != "forward":
        return lambda: torch.autograd.grad((y := call()), trained, _upstream(y.shape), allow_unused=True)

    def forward() -> Any:
        with torch.no_grad():
            return call()

    return forward


@cache
def _upstream(shape: torch.Size) -> Tensor:
    return _drawn(*shape)


@cache
def _clock() -> Clock:
    """Clock of the GPU that is here.

    Raises
    ------
    UsageError
        There is none.
    """
    if not torch.cuda.is_available():
        raise UsageError("no CUDA device here; expected one GPU")
    return clock_for(DEVICE)


def _product_s() -> float:
    """Seconds of a multiply-add in a large product."""
    side = 8192
    one = _drawn(side, side)
    return _seconds(lambda: one @ one, [], "forward") / side**3


SIZES: tuple[Sizes, ...] = (
    (64, 16, 1024, 2048),
    (1024, 16, 1024, 2048),
    (16_384, 16, 1024, 2048),
    (8192, 4, 2880, 2880),
)


def _sizes(settings: Settings) -> list[Sizes]:
    return [*SIZES[: 2 if settings.quick else None]]


STUDIES = (
    Study(
        title="Experts alone",
        quality="of a large product's rate, %",
        baseline="one expert after another",
        note="Products of all experts, rows shared evenly: how fast they are beside one product of 8,192^3. bf16,"
        " gate, up and down. The runtime and the profile take the grouped product where there is one.",
        instances=_sizes,
        rows=_products,
    ),
    Study(
        title="A routed block under a plan",
        quality="",
        baseline="experts alone",
        note="What the runtime adds to experts: router, row counts, gathers, exchanges and sums of one layer. One rank"
        " over NCCL, top-2. Beyond experts: seconds more than the experts and the gather and sum by token.",
        instances=_sizes,
        rows=_blocks,
    ),
    Study(
        title="Degrees of a pipeline in one rank",
        quality="",
        baseline="degree 1",
        note="Whether chunks overlap where exchanges are copies on NCCL's own stream. Its exchanges alone: what could"
        " be hidden at most. What several GPUs gain is not seen here.",
        instances=lambda settings: [(16_384, 16, 1024, 2048), (65_536, 16, 1024, 2048)][
            : 1 if settings.quick else None
        ],
        rows=_degrees,
    ),
    Study(
        title="Condensation",
        quality="of the expert pass, %",
        note="What condensation adds to a layer, in shares of an expert pass of as many tokens. A rank of four devices,"
        " top-2 of 16 experts, tokens alike in threes. Choice among near rows: its part of the cover.",
        instances=lambda settings: [(4096, 16, 1024, 4096), (16_384, 16, 1024, 4096)][: 1 if settings.quick else None],
        rows=_condensed,
    ),
    Study(
        title="The law of attention",
        quality="mean error, %",
        note="How far LUFFY's law is from the runtime's own attention on batches it was not fitted to, lengths of 64 to"
        " 4,096. Hidden size 1,024, heads of 64, 8 of keys and values; bf16. With seconds a"
        " sample: what the law lacks. Of the profile's case: the law fitted to what a profile measures, fused causal"
        " attention of whole batches.",
        instances=lambda _: [1024],
        rows=_attention,
    ),
    Study(
        title="Experts that change their owner",
        quality="s per expert",
        note="A move of experts of 2 x 2,880 x 2,880 in bf16 with AdamW's two states. Two ranks on one GPU over gloo,"
        " so that rows go through the host: an upper bound for GPUs that are joined.",
        instances=lambda _: [1, 8],
        rows=_moves,
    ),
    Study(
        title="Measuring a profile",
        quality="median error held out, %",
        note="`moeplan profile` on this GPU: seconds, series, and predictions of routed blocks off its grid.",
        instances=lambda settings: ["quick", "default"][: 1 if settings.quick else None],
        rows=_profiles,
    ),
)
