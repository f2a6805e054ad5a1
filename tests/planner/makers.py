"""Plans and traces as tests make them, what plans say, and the balance of one by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeplan.planner.cli.screen import HangingConsole
from moeplan.planner.document import Drawing, Section
from moeplan.planner.evaluate.costs import CostModel
from moeplan.planner.evaluate.scene import Passes, Scene
from moeplan.planner.evaluate.splits import index_samples, index_units
from moeplan.planner.evaluate.traffic import SampleCounts
from moeplan.planner.options import PipelineOptions
from moeplan.planner.report.plan import show_report
from moeplan.planner.request import Request
from moeplan.planner.solve import Made, make, solve
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.profile import load
from moeplan.runtime.plan import Part, Plan, save
from moeplan.traces.count_form import CountTable, CountTrace, read_counts, write_counts
from moeplan.traces.model import ModelSpec
from moeplan.traces.reader import Trace, open_trace
from moeplan.traces.schema import PHASES, TokenBatch
from moeplan.traces.split import fitted
from moeplan.traces.writer import TraceWriter
from tests.builders import meta_of, model

Loads = NDArray[np.int64]


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


def held_out(loads: Loads, *, seed: int = 0, fraction: float = 0.5, ids: Loads | None = None) -> Loads:
    """The loads of the units that are held out."""
    return loads[~fitted(np.arange(len(loads)) if ids is None else ids, seed=seed, fraction=fraction)]


def balances(plan: Plan, loads: Loads) -> NDArray[np.float64]:
    """Max over mean device load in every step and layer `[B, L]`, replicas sharing alike, from the plan's own lists."""
    assert plan.decisions.placement is not None
    slots, rows = plan.decisions.placement.slots_per_device, plan.decisions.placement.physical_to_logical
    widths = [slots] * plan.cluster.num_devices if isinstance(slots, int) else list(slots)
    found = np.zeros(loads.shape[:2])
    for step, layer in np.ndindex(*found.shape):
        row, at, devices = list(rows[layer]), 0, []
        for width in widths:
            devices.append(sum(loads[step, layer, e] / row.count(e) for e in row[at : at + width]))
            at += width
        used = [load for load, width in zip(devices, widths, strict=True) if width]
        found[step, layer] = max(used) * len(used) / sum(used)
    return found


def solved(trace: Trace | CountTrace, cluster: str = "2x2", links: tuple[str, ...] = (), **options: Any) -> Made:
    """The policy of a trace."""
    request = Request.of(strategy="netmoe", trace=trace.path, cluster=Cluster.parse(cluster, links), **options)
    return make(request)


def judged(plan: Plan) -> dict[str, dict[str, float]]:
    """Label and metric to value on the part that judges."""
    assert plan.evaluation is not None
    part = plan.evaluation.judging
    return {c.label: {name: metric.value for name, metric in c.metrics.items()} for c in part.contenders}


def part_of(plan: Plan) -> Part:
    """The held-out part."""
    assert plan.evaluation is not None
    assert plan.evaluation.held_out is not None
    return plan.evaluation.held_out


def generated(
    folder: Path, *, alpha: float, samples: int = 256, layers: int = 3, seed: int = 0, uneven: bool = False
) -> CountTrace:
    """Counts of samples with preferences Dirichlet(alpha / E) that a chain of experts carries from layer to layer; the
    samples have 256 tokens each, or 16 to 1024.
    """
    rng = np.random.default_rng(seed)
    experts, chain = 8, rng.dirichlet(np.full(8, 0.1), (layers - 1, 8))
    counts = np.zeros((samples, layers, experts), np.int64)
    for i in range(samples):
        length = int(2 ** rng.uniform(5, 11)) if uneven else 512
        counts[i, 0] = rng.multinomial(length, rng.dirichlet(np.full(experts, alpha / experts)))
        for layer in range(1, layers):
            counts[i, layer] = sum(map(rng.multinomial, counts[i, layer - 1], chain[layer - 1]))
    table = CountTable(
        sample=np.repeat(np.arange(samples), layers),
        layer=np.tile(np.arange(layers, dtype=np.int32), samples),
        counts=counts.reshape(-1, experts),
    )
    spec = model(layers, name="generated", hidden_size=64, dtype_bytes=2)
    write_counts(folder, meta_of(spec, form="counts"), [table])
    return read_counts(folder)


def make_plan(trace: Any, by: Path, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"strategy": "pipemoe", "trace": str(trace.path), "cluster": load(by).cluster}
    return solve(Request.of(**settings | {"profile": by} | changes))


def placed(trace: Any, profile: Path, path: Path, **changes: Any) -> Path:
    """A base: experts placed by eplb."""
    save(make_plan(trace, profile, **{"strategy": "eplb"} | changes), path)
    return path


def training(trace: Any, folder: Path) -> Any:
    """The trace with every token in training."""
    train = PHASES.index("train")
    tokens = (replace(batch, phase=np.full(len(batch), train, np.int8)) for batch in trace.batches())
    return stored_tokens(folder, trace.model, *tokens)


def options(plan: Plan) -> PipelineOptions:
    return PipelineOptions.model_validate(dict(plan.options["pipeline"]))


def seconds(plan: Plan, label: str, metric: str) -> float:
    assert plan.evaluation is not None
    return next(one for one in plan.evaluation.fit.contenders if one.label == label).metrics[metric].value


def scene_of(
    trace: Any,
    cluster: str | Cluster,
    *,
    profile: Path | None = None,
    fraction: float = 1.0,
    each: int = 4,
    moving: bool = False,
    passes: Passes | None = None,
) -> Scene:
    """A trace whose fitted units are judged, in steps of so many; `moving`: samples counted one by one."""
    where = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    index: Any = index_samples(trace) if moving else index_units(trace)
    fitted_U = index.fitted(seed=3, fraction=fraction)
    return Scene(
        trace,
        index,
        [index.cohort(fitted_U, num_devices=where.num_devices, samples_per_step=each)],
        where,
        trace.meta.model,
        CostModel.of(None if profile is None else load(profile), where, trace.meta.model, samples=True),
        seed=0,
        samples=SampleCounts(trace, index, fitted_U, where) if moving else None,
        passes=passes,
    )


def stored_tokens(folder: Path, spec: ModelSpec, *batches: TokenBatch) -> Trace:
    """A trace of these tokens."""
    with TraceWriter(folder, meta_of(spec)) as writer:
        for batch in batches:
            writer.append(batch)
    return open_trace(folder)


def said(plan: Plan) -> str:
    """All that a wide screen says of a plan."""
    console = HangingConsole(400)
    with console.capture() as captured:
        show_report(plan, Path("plan.json"), console, verbose=True)
    return captured.get()


def figure_in(section: Section) -> Any:
    """The only drawing of a section."""
    (figure,) = (part.make() for part in section.body if isinstance(part, Drawing))
    return figure
