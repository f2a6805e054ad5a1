"""Plans as a forger would leave them: one value of their JSON changed."""

import re
from typing import Any

from moeplan.files import sha256_json
from moeplan.runtime.plan import Plan, parse


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
