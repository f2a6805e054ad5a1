"""Auto on the real routing of gpt-oss-20b, beside every candidate that it tried, each solved anew and judged alike.

What auto chose on an inner split should be the best on held-out samples, or within its interval; all of it should take
at most 1.5 times as long as the solves it contains, one after another.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from moeplan.planner.request import Request
from moeplan.planner.solve import Decided, decide, judge, make, task_for
from moeplan.planner.strategies.auto import AutoParams
from moeplan.planner.strategies.auto.search import Parts, Search, named
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.presets import load_preset
from moeplan.profilers.profile import save
from moeplan.runtime.plan import Plan
from moeplan.traces.importers import import_trace

from ..routing import GPT_OSS
from ..study import Row, Settings, Study

PRESET = "h200_sxm"
SEQUENCES = 64  # per device, in decode
Instance = tuple[Path, str, str]


def _instances(settings: Settings) -> list[Instance]:
    sizes = ("2x8",) if settings.quick else ("1x8", "2x8", "4x8")
    return [(settings.data / GPT_OSS, size, use) for size in sizes for use in ("decode", "prefill")]


def _rows(instance: Instance) -> Iterator[Row]:
    """Auto, then every candidate by what it gains on held-out samples; ratios are to all candidates' solves."""
    source, size, use = instance
    with tempfile.TemporaryDirectory() as folder:
        trace, profile = Path(folder) / "trace", Path(folder) / "profile.json"
        import_trace(source, trace, hidden_size=2880, dtype_bytes=2, ffn_size=2880)
        save(load_preset(PRESET), profile)
        cluster = Cluster.parse(size)
        cluster = replace(cluster, links=load_preset(PRESET).cluster.links)
        request = Request.of(
            strategy="auto",
            trace=str(trace),
            cluster=cluster,
            profile=profile,
            concurrency=SEQUENCES * cluster.num_devices if use == "decode" else None,
        )
        began = time.perf_counter()
        plan = make(request).plan
        auto_s, singles = time.perf_counter() - began, list(_candidates(request))
    name, sum_s = f"{size} {use}", sum(seconds for _, _, seconds in singles)
    yield _row(name, f"auto: {' + '.join(plan.strategies)}", plan, auto_s, ratio=auto_s / sum_s)
    for parts, one, seconds in sorted(singles, key=lambda single: -_gain(single[1])):
        yield _row(name, named(parts), one, seconds, ratio=seconds / sum_s)


def _candidates(request: Request) -> Iterator[tuple[Parts, Plan, float]]:
    """The candidates of auto with their plans on all fitted samples, and the seconds of the last part's solve."""
    search = Search(task_for(request), AutoParams(), time.perf_counter())
    search.run()
    decided: dict[Parts, Decided] = {}
    for candidate in sorted(search.ranked(), key=lambda one: len(one.parts)):
        parts = candidate.parts
        search.task.shared.clear()  # as a command of its own reads the trace
        began = time.perf_counter()
        decided[parts] = decide(search.task_of(parts[-1], decided.get(parts[:-1]), inner=False))
        yield parts, judge(decided[parts]).plan, time.perf_counter() - began


def _row(name: str, method: str, plan: Plan, seconds: float, *, ratio: float) -> Row:
    share = None if plan.verdict is None else plan.verdict.share
    ends = {} if share is None or share.low is None or share.high is None else {"low": share.low, "high": share.high}
    return Row(name, method, quality=_gain(plan), seconds=seconds, ratio=ratio, more=ends)


def _gain(plan: Plan) -> float:
    """The share of today's step that a plan saves."""
    return plan.verdict.share.value if plan.verdict and plan.verdict.share else 0.0


STUDIES = (
    Study(
        title=f"gpt-oss-20b on H200 ({PRESET}), held out",
        quality="saved of today's step, %",
        instances=_instances,
        rows=_rows,
        baseline="the sum of all candidates' solves",
        note="Seconds are wall time; a candidate's are those of its last part, on the others' decisions.",
        needs=GPT_OSS,
    ),
)
