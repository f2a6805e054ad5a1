"""Auto beside an exhaustive judgement: every legal combination of parts, each solved and judged on held-out samples.

Combinations are enumerated here, whatever auto tries: a placement or none, degrees or none, a sample policy or none,
under every dispatch model. What auto chose on an inner split should be the best of them, or within its interval.
"""

import itertools
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from moeplan.errors import MoeplanError
from moeplan.planner.evaluate.evaluate import evaluate
from moeplan.planner.evaluate.journey import Contender, journey_of, today
from moeplan.planner.evaluate.metrics import Figures
from moeplan.planner.request import Request
from moeplan.planner.solve import Decided, Solved, decide, judge, make, task_for
from moeplan.planner.strategies.auto import AutoParams
from moeplan.planner.strategies.auto.candidate import Component, Components, named
from moeplan.planner.strategies.auto.options import AutoOptions
from moeplan.planner.strategies.auto.search import Search
from moeplan.planner.strategies.registry import STRATEGIES, strategy
from moeplan.planner.task import Task
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.description import on_cluster
from moeplan.profilers.presets import load_preset
from moeplan.profilers.profile import save
from moeplan.runtime.decisions import TRAINED
from moeplan.runtime.plan import Plan
from moeplan.traces.count_form import CountTrace
from moeplan.traces.importers import import_trace

from ..race import cpu_s
from ..routing import GPT_OSS, OLMOE, SMARTMOE
from ..study import Row, Settings, Study

PRESET, LINK = "h200_sxm", ("inter=50:5",)
AUTO = "auto"
SEARCH_S = 2.0  # of a search that lasts as long as it may
PROMPTS = 1024  # tokens per device and step, beside the usual step of decode
SOLVES = "of the sum of solves, %"
BEYOND = "more than auto, %", "from, %", "to, %"
KINDS = ("placement", "pipeline", "sample_policy")  # one may stand on those before it
GPT = {"hidden_size": 2880, "ffn_size": 2880, "kv_size": 1024, "dtype_bytes": 2}
OLM = {"hidden_size": 2048, "ffn_size": 1024, "dtype_bytes": 2, "top_k": 8}
SMART = {"hidden_size": 1024, "ffn_size": 4096, "dtype_bytes": 2, "top_k": 2}


@dataclass(frozen=True)
class Instance:
    """A recording, what its file does not say of the model, and a request."""

    name: str
    source: Path | None  #: None: the embedded model's trace
    sizes: dict[str, Any]
    cluster: str
    request: dict[str, Any] = field(default_factory=dict)
    timed: bool = True  #: Whether a profile times steps


def _instances(settings: Settings) -> list[Instance]:
    data, prompts = settings.data, "prefill"
    rows = [Instance("embedded 2x2", None, {}, "2x2", timed=False)]
    for size in ("2x8", "1x8", "4x8") if settings.full else ("2x8",):
        tokens = PROMPTS * Cluster.parse(size).num_devices
        rows.append(Instance(f"gpt-oss-20b {size} decode", data / GPT_OSS, GPT, size))
        rows.append(Instance(f"gpt-oss-20b {size} {prompts}", data / GPT_OSS, GPT, size, {"tokens_per_step": tokens}))
    rows.append(Instance("OLMoE 2x8", data / OLMOE, OLM, "2x8"))
    rows.append(Instance("SmartMoE 2x8 training", data / SMARTMOE, SMART, "2x8", {"purpose": "training"}))
    return rows[:1] if settings.quick else rows


@dataclass(frozen=True)
class Combination:
    """Parts solved on all fitted samples, one on top of the other, and the CPU seconds of the last one's solve."""

    parts: Components
    decided: Decided
    seconds: float
    beside: bool = True  #: Whether it can be judged beside all others


def _rows(instance: Instance) -> Iterator[Row]:
    """Auto, then every combination by what it gains on held-out samples, each beside auto draw by draw."""
    with tempfile.TemporaryDirectory() as folder:
        request = _request(instance, Path(folder))
        make(request)  # compiles what it needs
        began = cpu_s()
        auto = make(request)
        auto_s = cpu_s() - began
        search = Search(task_for(request), AutoParams.of(request.params), time.perf_counter())
        every = list(_combinations(search, {one.parts for one in AutoOptions.of(auto.plan).tried}))
        figures, usual = _judged(search, [one for one in every if one.beside], auto)
    sum_s, metric = sum(one.seconds for one in every), AutoOptions.of(auto.plan).metric
    ours, base = figures.pop(AUTO), usual.value[metric]

    def row(name: str, one: Figures, seconds: float | None) -> Row:
        gain, share = one.gain(metric, ours), one.share(metric, usual)
        more = {} if seconds is None else {SOLVES: seconds / sum_s}
        if one is not ours and gain.low is not None and gain.high is not None:
            more |= dict(zip(BEYOND, (gain.value / base, gain.low / base, gain.high / base), strict=True))
        return Row(instance.name, name, quality=share.value if share else None, seconds=seconds, more=more)

    yield row(f"auto: {' + '.join(auto.plan.strategies)}", ours, auto_s)
    seconds_of = {named(one.parts): one.seconds or None for one in every}
    for name, one in sorted(figures.items(), key=lambda item: item[1].value[metric]):
        yield row(name, one, seconds_of[name])


def _request(instance: Instance, folder: Path) -> Request:
    trace, profile, cluster = folder / "trace", None, Cluster.parse(instance.cluster)
    if instance.source is None:
        with as_file(files("moeplan.planner.demo") / "trace.parquet") as path:
            trace = trace.with_suffix(".parquet")
            trace.write_bytes(path.read_bytes())
    else:
        import_trace(instance.source, trace, **instance.sizes)
    if instance.timed:
        links = LINK if cluster.num_nodes > 1 else ()
        timed, profile = on_cluster(load_preset(PRESET), instance.cluster, links), folder / "profile.json"
        save(timed, profile)
        cluster = timed.cluster
    return Request.of(strategy="auto", trace=str(trace), cluster=cluster, profile=profile, **instance.request)


def _combinations(search: Search, tried: Collection[tuple[str, ...]]) -> Iterator[Combination]:
    """Every legal combination of parts; of those that auto tried the solve is timed, judgement included."""
    known = dict[Components, Decided]()
    choices = [[None, *(part for part in _parts(search.task) if part.strategy.decides == kind)] for kind in KINDS]
    for chosen in itertools.product(*choices):
        parts = tuple(part for part in chosen if part is not None)
        base = known.get(parts[:-1])
        solved = tuple(part.name for part in parts) in tried
        # Where samples move, counts do not say which replica of others serves a token.
        beside = not (isinstance(search.task.source, CountTrace) and any(one.strategy.moves_samples for one in parts))
        if not (beside or solved):
            continue
        if not parts or (parts[1:] and (base is None or not parts[-1].strategy.stands_on(base.plan))):
            continue
        search.task.shared.clear()  # as a command of its own reads the trace
        began, seconds = cpu_s(), 0.0
        try:
            decided = decide(search.task_of(parts[-1], base, inner=False, search_s=SEARCH_S))
            if solved:
                judge(decided)
                seconds = cpu_s() - began
        except MoeplanError:
            continue  # none of this trace
        known[parts] = decided
        yield Combination(parts, decided, seconds, beside)


def _parts(task: Task) -> Iterator[Component]:
    """Every strategy that suits the use, under every dispatch model, with every number of replicas that it tries."""
    for chosen in map(strategy, STRATEGIES):
        for model, params in itertools.product(chosen.dispatch_models, chosen.variants(task)):
            if (task.use == "training" and model not in TRAINED) or (task.use and task.use not in chosen.uses):
                continue
            yield Component(chosen, model, params)


def _judged(search: Search, every: list[Combination], auto: Solved) -> tuple[dict[str, Figures], Figures]:
    """The figures of auto's plan and of all combinations, by name, and today's: in one setting and the same draws."""
    usual = today(auto.plan.model, auto.plan.cluster)
    contenders = [_contender(AUTO, auto.plan, auto.sidecars), usual]
    contenders += [_contender(named(one.parts), one.decided.plan, one.decided.sidecars) for one in every]
    most = max(every, key=lambda one: len(one.parts))  # in its setting there is a place for what all others decide
    base = next((one.decided for one in every if one.parts == most.parts[:-1]), None)
    task = search.task_of(most.parts[-1], base, inner=False)
    judged = evaluate(task.judging_scenes, contenders).judged
    figures = {one.name: judged[one.label] for one in contenders}
    return figures, figures.pop(usual.name)


def _contender(name: str, plan: Plan, sidecars: Mapping[str, bytes]) -> Contender:
    return Contender(name, journey_of(plan, lambda file: sidecars[file.file]))


STUDIES = (
    Study(
        title=f"Every combination of parts ({PRESET}), held out",
        quality="saved of today's step, %",
        instances=_instances,
        rows=_rows,
        note="auto's plan beside every legal combination: what each saves of today's step (of counts, of today's"
        " seconds of experts; without a profile, of the busiest device's load), and how much more than auto's, with the"
        " 95 % interval of that difference. Where the interval holds 0, auto's plan is as good within what the samples"
        " tell; less than 1 % does not matter, and auto keeps the plan that needs less. Seconds are CPU time, of a"
        " combination those of its last part on the others' decisions, and beside them their share of the sum of all"
        " that auto tries; combinations without were not tried by auto."
        f" exflow searches for {SEARCH_S:g} s' worth of work.",
        needs=GPT_OSS,
    ),
)
