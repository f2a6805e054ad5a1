"""Plans as a forger would leave them, one value of their JSON changed, and traces that say other things."""

import re
from pathlib import Path
from typing import Any

from moeplan.files import sha256_json
from moeplan.runtime.plan import Plan, parse
from moeplan.traces.reader import Trace, open_trace
from moeplan.traces.writer import TraceWriter


def edited(plan: Plan, path: str, change: Any, *, hashed: bool = False) -> Plan:
    """The plan with the value at a path changed, steps apart by dots or slashes; `hashed`: and its own hash anew."""
    value = plan.model_dump(mode="json")
    *way, last = [int(step) if step.isdigit() else step for step in re.split("[./]", path)]
    place: Any = value
    for step in way:
        place = place[step]
    place[last] = change(place[last]) if callable(change) else change
    if hashed:
        value["plan_sha256"] = sha256_json({part: value[part] for part in ("decisions", "cluster", "model")})
    return parse(value, "edited")


def rewritten(trace: Trace, folder: Path, **changes: Any) -> Trace:
    """The same tokens under changed metadata."""
    with TraceWriter(folder, trace.meta.model_copy(update=changes)) as writer:
        for batch in trace.batches():
            writer.append(batch)
    return open_trace(folder)
