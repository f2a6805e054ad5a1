"""LUFFY's homes of samples: attention and exchange together, beside dealing, NetMoE and the paper's algorithm.

Held out, whole runs, homes found online, the next layer predicted. Links are described; attention is that of an H100's
matrix products at 750 TFLOP/s, which were measured, and of scores at 350 TFLOP/s, which is assumed.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moeplan.planner.demo.model import Attention as Embedded
from moeplan.planner.demo.model import ModelConfig
from moeplan.planner.evaluate.costs import CostModel
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.attended import attended
from moeplan.profilers.cases import CASES
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.description import describe
from moeplan.profilers.fits.fitting import fit_series
from moeplan.profilers.fits.laws import least_relative
from moeplan.profilers.measurement import Measurement
from moeplan.profilers.profile import load, save
from moeplan.profilers.series import Series
from moeplan.profilers.world import World
from moeplan.solvers import luffy
from moeplan.traces.importers import import_trace

from ..race import cpu_s
from ..routing import GPT_OSS, OLMOE
from ..study import Row, Settings, Study

SAVED = "attention + exchange saved, %"
FAST = ("intra=400:2", "inter=100:5")
SIZES: dict[str, dict[str, Any]] = {
    GPT_OSS: {"hidden_size": 2880, "dtype_bytes": 2},
    OLMOE: {"hidden_size": 2048, "dtype_bytes": 2, "top_k": 8},
}
ATTENTION = {GPT_OSS: "71:23@2880", OLMOE: "45:12@2048"}
PACKED, PADDED = ("packed", "equal"), ("padded", "free")
OF_PROFILE = {"of a profile's fused attention": ("attention",), "of a profile's attended": ("attention", "attended")}
GENERATED = {"250 tokens": (250, 0.8), "4,000 tokens": (4000, 1.0)}  # mean length, sigma of its logarithm


@dataclass(frozen=True, slots=True)
class Case:
    """A trace on a cluster, in steps of so many samples."""

    name: str
    source: Path | None  #: None: generated
    cluster: str
    samples: int
    how: tuple[str, str] = PACKED  #: Batches of attention, and numbers of samples on devices

    def plan(self, folder: Path) -> Any:
        """The plan of the trace, by the product itself."""
        sizes: dict[str, Any] = {"hidden_size": 2880, "dtype_bytes": 2, "top_k": 2}
        attention, source = ATTENTION[GPT_OSS], self.source
        if source is None:
            source = folder / "generated.npz"
            counts, length = _generated(*GENERATED[self.name])
            np.savez(source, counts=counts, n_tokens=length)
        else:
            key = next(one for one in SIZES if str(source).endswith(one))
            sizes, attention = SIZES[key], ATTENTION[key]
        import_trace(source, folder / "trace", **sizes)
        links = FAST if Cluster.parse(self.cluster).num_nodes > 1 else FAST[:1]
        save(describe(self.cluster, links, attention), folder / "profile.json")
        batches, numbers = self.how
        request = Request.of(
            strategy="luffy",
            trace=str(folder / "trace"),
            cluster=load(folder / "profile.json").cluster,
            profile=folder / "profile.json",
            samples_per_step=self.samples,
            batches=batches,
            numbers=numbers,
        )
        return solve(request)


def _generated(mean: int, sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """Counts and lengths of samples whose preferences among 16 experts are permuted from layer to layer."""
    rng = np.random.default_rng(0)
    length = np.maximum(np.rint(mean * rng.lognormal(-(sigma**2) / 2, sigma, 512)), 8).astype(np.int64)
    share_IE = rng.dirichlet(np.full(16, 0.5 / 16), 512)
    counts = np.zeros((512, 8, 16), np.uint32)
    for layer in range(8):
        share_IE = share_IE[:, rng.permutation(16)]
        for sample, share_E in enumerate(share_IE):
            counts[sample, layer] = rng.multinomial(2 * length[sample], share_E)
    return counts, length


def _rows(case: Case) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        plan = case.plan(Path(folder))
    metrics = {one.name: one.metrics["attention_exchange_s"].value for one in plan.evaluation.judging.contenders}
    today, outcome = plan.evaluation.judging.contenders[1].name, plan.outcome["sample_policy"]
    name = f"{case.name}, {case.cluster}, {' '.join(case.how)}"
    for contender, seconds in metrics.items():
        more = {"gap, %": outcome.gap or 0.0} if contender == "plan" else {}
        if contender != today:
            yield Row(name, contender, quality=1 - seconds / metrics[today], more=more)


def _cases(settings: Settings) -> list[Case]:
    gpt, olmoe = settings.data / GPT_OSS, settings.data / OLMOE
    real = [
        Case("gpt-oss-20b", gpt, "2x4", 32),
        Case("gpt-oss-20b", gpt, "1x8", 32),
        Case("gpt-oss-20b", gpt, "2x8", 64),
        Case("OLMoE-1B-7B", olmoe, "2x4", 32),
    ]
    padded = [Case(one.name, one.source, one.cluster, one.samples, PADDED) for one in real]
    return real[:1] if settings.quick else real + padded


def _made(settings: Settings) -> list[Case]:
    cases = [Case(name, None, "2x4", 32, how) for name in GENERATED for how in (PACKED, ("packed", "free"), PADDED)]
    return cases[:1] if settings.quick else cases


def _speed(instance: tuple[str, int]) -> Iterator[Row]:
    """Seconds of one re-homing, its bound left out."""
    text, samples = instance
    several = Cluster.parse(text).num_nodes > 1
    cluster, rng = Cluster.parse(text, FAST if several else FAST[:1]), np.random.default_rng(0)
    tokens = np.maximum(rng.lognormal(np.log(250), 0.8, samples), 1).astype(np.int64)
    now, later = (tokens[:, None] * 2 * rng.dirichlet(np.full(cluster.num_devices, 0.3), samples) for _ in range(2))
    copies, law = np.rint(now).astype(np.int64), luffy.Law(0.0, 71e-9, 23e-12)
    luffy.compile_rehoming(cluster)
    for batches in ("packed", "padded"):
        attention = luffy.Attention(luffy.Law(0.0, law.token_s, law.square_s, batches), tokens, tokens**2)
        call = partial(
            luffy.rehome,
            "joint",
            copies,
            copies.sum(axis=1),
            cluster,
            attention,
            next_copies=later,
            copy_bytes=5760.0,
            bounded=False,
        )
        times = []
        for _ in range(30):
            started = cpu_s()
            call()
            times.append(cpu_s() - started)
        yield Row(f"{samples} samples, {text}", batches, seconds=float(np.median(times)), least_s=min(times))


def _attention(model: tuple[int, int, int]) -> Iterator[Row]:
    """Error of the law on the runtime's own attention: held out, and of the law that a profile's cases give."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    hidden, heads, kv_heads = model
    config = ModelConfig(
        vocab_size=50,
        num_layers=1,
        num_experts=4,
        top_k=2,
        hidden_size=hidden,
        ffn_size=64,
        num_heads=heads,
        num_kv_heads=kv_heads,
        max_positions=1024,
    )
    attention, rng = Embedded(config).eval(), np.random.default_rng(0)
    batches = [[int(length)] * int(number) for number in (1, 4, 16) for length in (16, 64, 128, 256, 512)]
    mixed = [
        np.maximum(rng.lognormal(4.5, 0.8, number), 4).astype(int).clip(max=512).tolist()
        for number in (2, 4, 8, 16) * 5
    ]

    def seconds(lengths: list[int]) -> float:
        x = torch.randn(sum(lengths), config.hidden_size)
        position = torch.cat([torch.arange(length) for length in lengths])
        return _least_s(lambda: attended(attention, x, position, lengths))

    every = batches + mixed
    terms = np.array([[1, len({*one}), sum(one), sum(length**2 for length in one)] for one in every], float)
    for _turn in range(2):  # at first the process takes its memory from the system, page by page
        taken = np.array([seconds(one) for one in every])
    folds = np.arange(len(every)) % 5
    ways = {"a start and a call a length": [0, 1, 2, 3], "a call a length": [1, 2, 3], "neither": [2, 3]}
    errors = dict[str, np.ndarray]()
    for name, columns in ways.items():
        errors[name] = np.zeros(len(every))
        for fold in range(5):
            law = np.array(least_relative(terms[folds != fold][:, columns], taken[folds != fold]))
            errors[name][folds == fold] = np.abs(terms[folds == fold][:, columns] @ law / taken[folds == fold] - 1)
    for name, cases in OF_PROFILE.items():
        profile = describe("1x1").model_copy(update={"series": {one.key: one for one in map(_series, cases)}})
        costs = CostModel.of(profile, profile.cluster, config.spec(), samples=True, moving=True)
        curve = None if costs is None else costs.attention_of("migrating")
        assert curve is not None
        fitted = luffy.law_of(curve, np.concatenate(mixed))
        law = np.array([fitted.start_s, fitted.call_s, fitted.token_s, fitted.square_s])
        errors[name] = np.abs(terms @ law / taken - 1)
    for name, error in errors.items():
        for kind, of in (("equal", slice(0, len(batches))), ("mixed", slice(len(batches), None))):
            heads_of = f"{heads} heads of {hidden // heads}"
            yield Row(f"hidden {hidden}, {heads_of}, {kind} lengths", name, quality=float(error[of].mean()))


@cache
def _series(name: str) -> Series:
    """A case at all sizes of a profile, in CPU seconds of one process, and its fit."""
    case, world = CASES[name], World(0, 1, "cpu", ("here",), print)
    measured = list[Measurement]()
    for size in case.sizes(world, quick=False):
        inputs = case.prepare(size, "fp32", world)
        taken_s = _least_s(partial(case.run, inputs))
        measured.append(Measurement.of(size, case.work(size, 1), [taken_s]))
    fit = fit_series(case, 1, measured)
    return Series(case=name, dtype="fp32", ranks=1, unit="macs", fit=fit)


def _least_s(call: Callable[[], object]) -> float:
    """The least CPU seconds of nine calls in a row."""
    times = []
    with torch.no_grad():
        for _ in range(9):
            started = cpu_s()
            call()
            times.append(cpu_s() - started)
    return min(times)


STUDIES = (
    Study(
        title="Recorded routing",
        quality=SAVED,
        note="Seconds of attention, dispatch and combine saved of today's, on samples not seen. Padded: a device's"
        " samples are padded to its longest, and devices may take different numbers of them. The gap is to the bound of"
        " the fitted steps.",
        needs=GPT_OSS,
        instances=_cases,
        rows=_rows,
    ),
    Study(
        title="Generated samples",
        quality=SAVED,
        note="The same on generated samples: lengths are lognormal, and preferences persist across layers by"
        " construction.",
        instances=_made,
        rows=_rows,
    ),
    Study(
        title="Seconds of a re-homing",
        quality="",
        note="CPU seconds of one re-homing on one core, compiled, without its bound.",
        instances=lambda _: [("2x4", 32), ("1x8", 32), ("2x8", 64), ("4x8", 128)],
        rows=_speed,
    ),
    Study(
        title="The law of attention",
        quality="mean error on batches held out, %",
        note="How far the law is from the runtime's own attention, in CPU seconds, on batches that it was not fitted"
        " to: with a start and a call for each length of a batch, as the law has them, with calls alone, with neither;"
        " and the law that LUFFY takes from a profile without the case `attended`, and with it. The least of nine calls"
        " in a row, so that caches are warm.",
        instances=lambda _: [(64, 1, 1), (64, 4, 2), (256, 4, 4)],
        rows=_attention,
    ),
)
