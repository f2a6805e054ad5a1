"""Requests, plans, traces, profiles and scenes as tests make them, and what plans say.

Plans are `Any`, so that a test may look into one without asking part by part whether it is there.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.errors import CertificationError
from moeplan.files import sha256_json
from moeplan.planner.certify import certify
from moeplan.planner.cli.screen import HangingConsole
from moeplan.planner.document import Section
from moeplan.planner.evaluate.costs import CostModel
from moeplan.planner.evaluate.scene import Passes, Scene
from moeplan.planner.evaluate.step_size import StepSize
from moeplan.planner.evaluate.traffic import SampleCounts
from moeplan.planner.evaluate.units import index_samples, index_units
from moeplan.planner.options import PipelineOptions
from moeplan.planner.picture import Picture
from moeplan.planner.report.plan import show_report
from moeplan.planner.request import Request
from moeplan.planner.solve import make
from moeplan.profilers.cases import CASES
from moeplan.profilers.cluster import Cluster, Link
from moeplan.profilers.origin import Origin, now
from moeplan.profilers.profile import Profile, load, save
from moeplan.profilers.series import LinkKind
from moeplan.runtime.plan import Part, parse
from moeplan.traces.count_form import CountTable, CountTrace, read_counts, tabulate, write_counts
from moeplan.traces.model import ModelSpec
from moeplan.traces.reader import Trace, open_trace
from moeplan.traces.schema import PHASES, TokenBatch
from moeplan.traces.split import fitted
from moeplan.traces.writer import TraceWriter
from tests.builders import meta_of, model, series

Loads = NDArray[np.int64]


# Plans.


def request(
    trace: Any,
    strategy: str = "exflow",
    cluster: str | Cluster | None = None,
    links: tuple[str, ...] = (),
    **settings: Any,
) -> Request:
    """A request for a plan of a trace; without a cluster for that of its profile, or for 2x2, without any size in steps
    of four samples a device.
    """
    if cluster is None:
        cluster = load(settings["profile"]).cluster if settings.get("profile") else "2x2"
    if isinstance(cluster, str):
        cluster = Cluster.parse(cluster, links)
    if not settings.keys() & {"samples_per_step", "tokens_per_step", "concurrency", "purpose"}:
        settings["samples_per_step"] = 4 * cluster.num_devices
    return Request.of(strategy=strategy, trace=str(trace.path), cluster=cluster, **settings)


def made(*asked: Any, to: Path | None = None, **settings: Any) -> Any:
    """A plan with its sidecars, saved where it is to go; parameters as of `request`."""
    result = make(request(*asked, **settings))
    if to is not None:
        result.save(to)
    return result


def planned(*asked: Any, to: Path | None = None, **settings: Any) -> Any:
    """A plan; parameters as of `made`."""
    return made(*asked, to=to, **settings).plan


def edited(plan: Any, path: str, change: Any) -> Any:
    """The plan, rightly hashed, as a forger leaves it: the value at a path changed, steps apart by dots or slashes."""
    value = plan.model_dump(mode="json")
    *way, last = [int(step) if step.isdigit() else step for step in re.split("[./]", path)]
    place: Any = value
    for step in way:
        place = place[step]
    place[last] = change(place[last]) if callable(change) else change
    return parsed(value)


def parsed(value: dict[str, Any]) -> Any:
    """A plan of this JSON, rightly hashed."""
    digest = sha256_json({part: value[part] for part in ("decisions", "cluster", "model")})
    return parse(value | {"plan_sha256": digest}, "edited")


def assert_refused(plan: Any, *files: Any, words: str | None = None, folder: Path | None = None) -> None:
    """A plan does not certify with these files: trace and profile."""
    with pytest.raises(CertificationError, match=words):
        certify(plan, *files, folder=folder)


def figures(part: Part) -> dict[str, dict[str, float]]:
    """Label and metric to value."""
    return {one.label: {name: metric.value for name, metric in one.metrics.items()} for one in part.contenders}


def judged(plan: Any) -> dict[str, dict[str, float]]:
    """Label and metric to value on the part that judges."""
    return figures(plan.evaluation.judging)


def seconds(plan: Any, label: str, metric: str) -> float:
    """A figure of the fitted part."""
    return figures(plan.evaluation.fit)[label][metric]


def options(plan: Any) -> PipelineOptions:
    return PipelineOptions.model_validate(dict(plan.options["pipeline"]))


def balances(plan: Any, loads: Loads) -> NDArray[np.float64]:
    """Max over mean device load in every step and layer `[B, L]`, replicas sharing alike, from the plan's own lists."""
    slots, rows = plan.decisions.placement.slots_per_device, plan.decisions.placement.physical_to_logical
    widths = [slots] * plan.cluster.num_devices if isinstance(slots, int) else list(slots)
    ratios = np.zeros(loads.shape[:2])
    for step, layer in np.ndindex(*ratios.shape):
        row, at, devices = list(rows[layer]), 0, []
        for width in widths:
            devices.append(sum(loads[step, layer, e] / row.count(e) for e in row[at : at + width]))
            at += width
        used = [load for load, width in zip(devices, widths, strict=True) if width]
        ratios[step, layer] = max(used) * len(used) / sum(used)
    return ratios


def screen(report: Callable[..., None], *shown: Any, width: int = 400, **options: Any) -> str:
    """What a report says on a screen."""
    console = HangingConsole(width)
    with console.capture() as captured:
        report(*shown, console, **options)
    return captured.get()


def said(plan: Any) -> str:
    """All that a wide screen says of a plan."""
    return screen(show_report, plan, Path("plan.json"), verbose=True)


def pictures_in(section: Section) -> list[Any]:
    """The pictures of a section."""
    return [part for part in section.body if isinstance(part, Picture)]


# Traces.


def tallied(
    folder: Path,
    *,
    steps: int = 40,
    layers: int = 3,
    experts: int = 16,
    keys: tuple[str, ...] = ("step",),
    seed: int = 0,
    **known: Any,
) -> tuple[CountTrace, Loads]:
    """A trace of counts with skewed loads that vary from step to step, and its loads `[U, L, E]`."""
    rng = np.random.default_rng(seed)
    usual = np.random.default_rng(7).lognormal(0, 1, (layers, experts))
    shares = usual * rng.lognormal(0, 0.3, (steps, layers, experts))
    counts = np.array([[rng.multinomial(512, one / one.sum()) for one in step] for step in shares])
    return stored(folder, counts, keys, **known), counts


def stored(folder: Path, counts: Loads, keys: tuple[str, ...] = ("step",), **known: Any) -> CountTrace:
    """A trace of these counts `[U, L, E]`, every one a step, or a sample."""
    num_units, layers, experts = counts.shape
    unit = np.repeat(np.arange(num_units), layers)
    table = CountTable(
        step=unit.astype(np.int32) if "step" in keys else None,
        sample=unit * 3 if "sample" in keys else None,
        layer=np.tile(np.arange(layers, dtype=np.int32), num_units),
        counts=counts.reshape(-1, experts),
    )
    write_counts(folder, meta_of(model(layers, experts, name="tallied", **known), form="counts"), [table])
    return read_counts(folder)


def generated(folder: Path, *, alpha: float, samples: int = 256, uneven: bool = False) -> CountTrace:
    """Counts of samples with preferences Dirichlet(alpha / E) that a chain of experts carries through three layers; the
    samples have 256 tokens each, or 16 to 1024.
    """
    rng = np.random.default_rng(0)
    chain, counts = rng.dirichlet(np.full(8, 0.1), (2, 8)), np.zeros((samples, 3, 8), np.int64)
    for i in range(samples):
        length = int(2 ** rng.uniform(5, 11)) if uneven else 512
        counts[i, 0] = rng.multinomial(length, rng.dirichlet(np.full(8, alpha / 8)))
        for layer in (1, 2):
            counts[i, layer] = sum(map(rng.multinomial, counts[i, layer - 1], chain[layer - 1]))
    return stored(folder, counts, ("sample",), hidden_size=64, dtype_bytes=2)


def counted(trace: Trace, folder: Path) -> CountTrace:
    """The trace in count form."""
    write_counts(folder, trace.meta.model_copy(update={"form": "counts"}), tabulate(trace))
    return read_counts(folder)


def held_out(loads: Loads, *, ids: Loads | None = None) -> Loads:
    """The loads of the units that are held out."""
    return loads[~fitted(np.arange(len(loads)) if ids is None else ids, seed=0, fraction=0.5)]


def fit_part(loads: Loads) -> Loads:
    """The loads of the units that are fitted."""
    return loads[fitted(np.arange(len(loads)), seed=0, fraction=0.5)]


def stored_tokens(folder: Path, spec: ModelSpec, *batches: TokenBatch) -> Trace:
    """A trace of these tokens."""
    with TraceWriter(folder, meta_of(spec)) as writer:
        for batch in batches:
            writer.append(batch)
    return open_trace(folder)


def rewritten(
    trace: Trace, folder: Path, change: Callable[[TokenBatch], Mapping[str, Any]] = lambda _: {}, **meta: Any
) -> Trace:
    """The trace with other columns, which `change` makes of a batch, under other metadata."""
    with TraceWriter(folder, trace.meta.model_copy(update=meta)) as writer:
        for batch in trace.batches():
            writer.append(replace(batch, **change(batch)))
    return open_trace(folder)


def sized(trace: Trace, folder: Path, **sizes: Any) -> Trace:
    """The trace with other sizes of the model."""
    return rewritten(trace, folder, model=replace(trace.model, **sizes))


def training(trace: Trace, folder: Path) -> Trace:
    """The trace with every token in training."""
    return rewritten(trace, folder, lambda batch: {"phase": np.full(len(batch), PHASES.index("train"), np.int8)})


def in_several_steps(trace: Trace, folder: Path) -> Trace:
    """The trace with tokens by turns in four steps, so that every sample is in each of them."""
    return rewritten(trace, folder, lambda batch: {"step": (batch.position % 4).astype(np.int32)})


def tokens(trace: Trace) -> Any:
    """The experts of all tokens, `[T, L, K]`."""
    return np.concatenate([batch.ids for batch in trace.batches()]).astype(int)


def scene_of(
    trace: Any,
    cluster: str | Cluster,
    *,
    profile: Path | None = None,
    fraction: float = 1.0,
    each: int | StepSize = 4,
    phases: tuple[str, ...] = (),
    moving: bool = False,
    passes: Passes | None = None,
) -> Scene:
    """A trace whose parts are judged, in steps of so many samples or of a size; `moving`: samples counted singly."""
    where = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    index: Any = (index_samples if moving else index_units)(trace, phases=phases or None)
    fitted_U = index.fitted(seed=3, fraction=fraction)
    parts = (mask for mask in (fitted_U, ~fitted_U) if mask.any())
    size = StepSize("samples", each) if isinstance(each, int) else each
    return Scene(
        trace,
        index,
        [index.cohort(mask, num_devices=where.num_devices, size=size) for mask in parts],
        where,
        trace.meta.model,
        CostModel.of(None if profile is None else load(profile), where, trace.meta.model, samples=True),
        seed=0,
        samples=SampleCounts(trace, index, fitted_U, where) if moving else None,
        passes=passes,
        phases=phases,
    )


# Profiles whose seconds follow known formulas, with a little noise.

SIZES: Mapping[str, list[dict[str, int]]] = {
    "all_to_all": [{"bytes": 256 << octave} for octave in range(14)],
    "all_gather": [{"bytes": 256 << octave} for octave in range(14)],
    "expert_ffn": [
        {"tokens": tokens, "experts": experts, "hidden": 64, "ffn": ffn, "grouped": grouped}
        for tokens in (8, 32, 128, 512)
        for experts in (2, 8)
        for ffn in (32, 128)
        for grouped in (0, 1)
    ],
    "attention": [
        {"batch": batch, "length": length, "hidden": hidden}
        for hidden in (64, 256)
        for batch in (1, 4)
        for length in (8, 32, 128)
    ],
}
A_S = {"all_to_all": 20e-6, "all_gather": 30e-6, "expert_ffn": 40e-6, "attention": 10e-6}
S_PER_WORK = {"all_to_all": 1e-9, "all_gather": 2e-9, "expert_ffn": 1e-10, "attention": 1e-10}


def write_profile(
    path: Path, cluster: str = "1x4", *, cases: tuple[str, ...] = tuple(SIZES), noise: float = 0.1
) -> Path:
    """Write a profile of a cluster with these cases; collectives over a node's devices, and over all of several."""
    where, rng = Cluster.parse(cluster), np.random.default_rng(0)
    places: list[tuple[int, int, LinkKind]] = [
        (where.devices_per_node, where.devices_per_node, "intra"),
        (where.num_nodes, where.num_devices, "inter"),
    ]
    crossed = [(ranks, link) for joined, ranks, link in places if joined > 1]
    measured = [
        series(
            name,
            ranks,
            link,
            dtype=CASES[name].dtypes("cpu")[0],
            sizes=SIZES[name],
            a_s=A_S[name],
            b_s=S_PER_WORK[name] * (4 if link == "inter" else 1),
            noise=lambda: float(np.exp(rng.normal(0, noise))),
        )
        for name in cases
        for ranks, link in (crossed if CASES[name].min_ranks > 1 else [(1, None)])
    ]
    links: dict[str, Link] = {link: Link(50e-6 if link == "inter" else 5e-6, 1e-9) for _, link in crossed}
    known = Cluster(where.num_nodes, where.devices_per_node, links)
    save(Profile.of(Origin(kind="described", created_at=now(), name="formulas"), known, measured), path)
    return path
