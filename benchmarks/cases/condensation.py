"""Condensed rows of the embedded model on text it never saw: saved beside what they cost, and rivals.

Samples of 256 bytes; 16 of them on each device, or 8 where a part is half of the text.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moeplan.planner.demo.text import other_text, record_embedded, record_text
from moeplan.planner.evaluate.journey import today
from moeplan.planner.evaluate.scene import Scene
from moeplan.planner.evaluate.step_size import StepSize
from moeplan.planner.evaluate.units import index_units
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.planner.strategies.luffy.condensation import furthest
from moeplan.planner.strategies.luffy.folding import EXACT, Gate, History, Star, Way
from moeplan.planner.strategies.luffy.measured import EMBEDDED, Call, Judged, Measured, Step, measured
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.encoded import SCALE_BYTES
from moeplan.runtime.engine.clusters import BLOCK
from moeplan.runtime.engine.condenser import standing
from moeplan.runtime.engine.copies import select
from moeplan.runtime.wire import Wire
from moeplan.traces.reader import open_trace

from ..race import race
from ..study import Row, Settings, Study

LENGTH = 256
BITS, ERROR = "bits per byte above all rows", "layer error, %"
COPIES = "1x16"
WIDTH, EXPERTS = 1024, 16  # of what is timed
DRAWN = 256  # tokens of an expert whose pairs are compared
ALIKE, KEPT, STAY = "cosine above .75, %", "change below .2 by the expert, %", "above .8, still so a block later, %"
PRINTED = {1: {ALIKE: 0.25, KEPT: 0.95, STAY: 0.9}, 6: {ALIKE: 0.85}}  # of the paper's MoE-TransformerXL
ROW_BYTES: dict[Wire | None, int] = {None: 128 * 2, "fp8": 128 + SCALE_BYTES}


@cache
def _recorded() -> Path:
    """The folder of the text and its trace."""
    folder = Path(tempfile.mkdtemp())
    text = f"{record_text()}\n\n{other_text()}"
    (folder / "text.txt").write_text(text, encoding="utf-8")
    record_embedded(text, folder / "trace", sample_tokens=LENGTH, weights=True)
    return folder


@cache
def _parts(cluster: str) -> tuple[Measured, Judged, Measured]:
    """The model on all of the text, what it loses as it is, and the model on the half that gains are taken from."""
    trace = open_trace(_recorded() / "trace")
    index, shape = index_units(trace), Cluster.parse(cluster)
    every = np.ones(len(index.unit_ids), np.bool_)
    number = len(every) // 16 * 16 if cluster == COPIES else 8 * shape.num_devices
    fitted = index.fitted(seed=0, fraction=0.5)
    scene = Scene.of(trace, index, [fitted, every], shape, size=StepSize("samples", number))
    half, whole = measured(scene, today(trace.model, shape).journey, EMBEDDED, _recorded() / "text.txt")
    if cluster == COPIES:  # an expert on each device, and tokens on none of these, so that every copy travels
        whole = replace(whole, steps=[_apart(step) for step in whole.steps])
    return whole, whole.judge(EXACT), half


def _apart(step: Step) -> Step:
    home = torch.full_like(step.seats.home, -1)
    device = torch.arange(len(step.place)).repeat_interleave(step.tokens.shape[1]) // 16
    return replace(step, seats=replace(step.seats, home=home, step=device))


def _ways(cluster: str, settings: Settings) -> list[tuple[str, Way]]:
    gains = _parts(cluster)[2].gains(16)
    gates = [Way(f"gates, tau {tau}", Gate(tau)) for tau in (0.15, 0.2, 0.25, 0.3)]
    times = [Way(f"gates times gains, tau {tau}", Gate(tau, gains)) for tau in (0.06, 0.08, 0.12)]
    stars = [Way(f"paper's star, cosine {h}", Star(h), medoid=True) for h in (0.95, 0.9, 0.8)]
    others = [
        Way("gates, the kept row as it is, tau 0.2", Gate(0.2), medoid=True),
        Way("paper's history 0.9:0.3, cosine 0.8", History(0.8, 0.9, 0.3), medoid=True),
        Way("fp8 rows", wire="fp8"),
        *(Way(f"fp8 rows and gates, tau {tau}", Gate(tau), wire="fp8") for tau in (0.17, 0.2)),
        *(Way(f"second experts below {gate} dropped", drop=gate) for gate in (0.2, 0.3, 0.4)),
    ]
    return [(cluster, way) for way in (gates[:1] if settings.quick else [*gates, *times, *stars, *others])]


def _rows(instance: tuple[str, Way]) -> Iterator[Row]:
    cluster, way = instance
    whole, exact, _ = _parts(cluster)
    judged = whole.judge(way)
    rise, low, high = judged.rise(exact, 0)
    saved = judged.counted.saved()
    more = {"bits": rise, "from": low, "to": high, ERROR: judged.error(0)[0]}
    more["bytes of bf16, %"] = (1 - saved) * ROW_BYTES[way.wire] / ROW_BYTES[None]
    yield Row("copies" if cluster == COPIES else cluster, way.name, quality=saved, more=more)


def _budget(most: float) -> Iterator[Row]:
    folder = _recorded()
    for method in ("joint", "paper"):
        request = Request.of(
            strategy="luffy",
            trace=str(folder / "trace"),
            cluster=Cluster.parse("2x4"),
            samples_per_step=64,
            condense_loss=most,
            model=EMBEDDED,
            text=folder / "text.txt",
            method=method,
        )
        part = solve(request).options["condensation"]["held_out"]
        ours = part["ways"][0]
        more = {"bits": ours["bits"]["value"], "from": ours["bits"]["low"], "to": ours["bits"]["high"]}
        name = "gates" if method == "joint" else "paper's star"
        yield Row(f"{most} bits", name, quality=ours["rows_saved"], more=more)
    fit, held_out = _halves()
    exact, as_is = fit.judge(EXACT), held_out.judge(EXACT)
    tau = furthest(lambda to: fit.judge(Way("copies", Gate(to))).rise(exact, 0)[0], most)
    assert tau is not None
    judged = held_out.judge(Way("copies", Gate(tau)))
    more = dict(zip(("bits", "from", "to"), judged.rise(as_is, 0), strict=True))
    yield Row(f"{most} bits", "gates, of copies", quality=judged.counted.saved(), more=more)


@cache
def _halves() -> tuple[Measured, Measured]:
    """The model on each half of the text, every copy travelling."""
    trace = open_trace(_recorded() / "trace")
    index, shape = index_units(trace), Cluster.parse(COPIES)
    fitted = index.fitted(seed=0, fraction=0.5)
    number = int(min(fitted.sum(), (~fitted).sum())) // 16 * 16
    scene = Scene.of(trace, index, [fitted, ~fitted], shape, size=StepSize("samples", number))
    halves = measured(scene, today(trace.model, shape).journey, EMBEDDED, _recorded() / "text.txt")
    fit, held_out = (replace(half, steps=[_apart(step) for step in half.steps]) for half in halves)
    return fit, held_out


@cache
def _calls() -> list[Call]:
    """Arguments of every block's experts in the first step on 2x4."""
    whole, calls = _parts("2x4")[0], list[Call]()
    hooks = [layer.module.register_forward_pre_hook(partial(_kept, calls), with_kwargs=True) for layer in whole.layers]
    with torch.inference_mode():
        whole.model(whole.steps[0].tokens)
    for hook in hooks:
        hook.remove()
    return calls


def _kept(calls: list[Call], _module: object, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
    x, ids, weights = (*args, *kwargs.values())[:3]
    calls.append(Call(x.flatten(0, -2), ids.flatten(0, -2).long(), weights.flatten(0, -2)))


def _similar(block: int) -> Iterator[Row]:
    """Pairs of tokens that choose one expert: how alike they are before it, after it and a block later."""
    if block in PRINTED:
        yield Row(f"block {block}", "paper, TransformerXL", more=PRINTED[block])
    before_p, after_p, apart_p, later_p = _pairs(block)
    near_p, later = before_p > 0.75, block < len(_calls())
    more = {
        ALIKE: _share(near_p),
        KEPT: _share((after_p - before_p)[near_p].abs() < 0.2),
        "outputs differ by, %": float(apart_p[near_p].median()),
        STAY: _share(later_p[before_p > 0.8] > 0.8) if later else None,
        "below .2, still so, %": _share(later_p[before_p < 0.2] < 0.2) if later else None,
    }
    yield Row(f"block {block}", "embedded model", more={name: x for name, x in more.items() if x is not None})


@torch.inference_mode()
def _pairs(block: int) -> Tensor:
    """Cosines of inputs, of outputs and of inputs a block later, and distances of outputs over the norm of one."""
    calls, experts, pairs = _calls(), _parts("2x4")[0].layers[block - 1].module, list[Tensor]()
    call, later = calls[block - 1], calls[block % len(calls)]
    for expert in range(EXPERTS):
        (token_n,) = (call.ids == expert).any(1).nonzero(as_tuple=True)
        token_n = token_n[torch.randperm(len(token_n), generator=torch.Generator().manual_seed(0))[:DRAWN]]
        y_nM = experts(call.x[token_n], torch.full((len(token_n), 1), expert), torch.ones(len(token_n), 1))
        first, second = torch.triu_indices(len(token_n), len(token_n), 1)
        apart_p = (y_nM[first] - y_nM[second]).norm(dim=1) / y_nM[first].norm(dim=1)
        cosines = (_cosine(of_nM)[first, second] for of_nM in (call.x[token_n], y_nM, later.x[token_n]))
        before_p, after_p, later_p = cosines
        pairs.append(torch.stack([before_p, after_p, apart_p, later_p]))
    return torch.cat(pairs, dim=1)


def _cosine(x_nM: Tensor) -> Tensor:
    u_nM = functional.normalize(x_nM.float(), dim=1)
    return u_nM @ u_nM.T


def _share(which: Tensor) -> float:
    return float(which.double().mean())


def _found(num_tokens: int) -> Iterator[Row]:
    """Clusters of tokens near 64 centres, each with two of 16 experts on devices of their own, one core."""
    rng = torch.Generator().manual_seed(0)
    centre_T = torch.randint(64, (num_tokens,), generator=rng)
    x_TM = torch.randn(64, WIDTH, generator=rng)[centre_T] + 0.3 * torch.randn(num_tokens, WIDTH, generator=rng)
    weight_TK, ids_TK = torch.rand(num_tokens, EXPERTS, generator=rng).softmax(1).topk(2)
    copies = select(ids_TK, ids_TK, None, (1, EXPERTS))
    remote_n, u_TM = copies.place > 0, functional.normalize(x_TM, dim=1)
    device_n = copies.place.argsort(stable=True)
    blocks = [one for rows in device_n.tensor_split(EXPERTS) for one in rows.tensor_split(-(-len(rows) // BLOCK))]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    calls = {
        "all pairs of a block multiplied": lambda: [u_TM[copies.row[one]] @ u_TM[copies.row[one]].T for one in blocks],
        "gates, priority cover": lambda: standing(copies, x_TM, weight_TK, remote_n, 0.2, cosine=False),
        "paper's star, cosine 0.8": lambda: standing(copies, x_TM, weight_TK, remote_n, 0.63, cosine=True),
    }
    timings = race(calls, next(iter(calls)))
    torch.set_num_threads(threads)
    for name, timing in timings.items():
        yield Row(f"{num_tokens:,} tokens", name, **timing.figures, axis="tokens", size=num_tokens)


STUDIES = (
    Study(
        title="Rows saved and what they cost",
        quality="rows saved, %",
        note="Rows to other devices that do not travel, and the loss above all rows, with its interval over samples, on"
        " 2x4. Gains: how much an expert's output changes by its input, over the norm of the residual stream. bf16 rows"
        " are 256 B; fp8 rows 128 B and a scale of 4 B, both ways.",
        instances=lambda settings: _ways("2x4", settings),
        rows=_rows,
    ),
    Study(
        title="Copies saved and what they cost",
        quality="copies saved, %",
        note="The same for token-expert copies, each expert on a device of its own and no token beside one.",
        instances=lambda settings: _ways(COPIES, settings),
        rows=_rows,
    ),
    Study(
        title="Thresholds chosen for a budget",
        quality="rows saved, %",
        note="Rows saved, and the loss on the half of the text that did not choose the threshold; and token-expert"
        " copies saved, each expert on a device of its own, by a threshold chosen there.",
        instances=lambda settings: [0.01] if settings.quick else [0.005, 0.01, 0.02],
        rows=_budget,
    ),
    Study(
        title="The paper's Figures 5 and 7",
        quality="",
        note="Pairs of tokens that choose one expert, 256 tokens an expert of 64 samples on 2x4: cosines of its inputs,"
        " and of its outputs for the same two. Outputs differ by the distance of the two over the norm of one, the"
        " median of the pairs above .75: what condensing takes for nothing. The paper's figures are of its text, after"
        " 30 iterations of training; it does not say whether its pairs share an expert.",
        instances=lambda settings: [1] if settings.quick else [1, 2, 3, 4, 5, 6],
        rows=_similar,
    ),
    Study(
        title="Seconds to find the rows of a layer",
        quality="",
        baseline="all pairs of a block multiplied",
        note="CPU time on one core for vectors of 1,024 elements, two of 16 experts a token. Linear in tokens from"
        " 8,192 on, where blocks of 1,024 rows are full.",
        instances=lambda settings: [1024] if settings.quick else [4096, 8192, 16384],
        rows=_found,
    ),
)
