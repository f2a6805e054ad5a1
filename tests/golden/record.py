"""A golden record: the JSON file of a case, a key for each section, and how another record differs from it."""

import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

SECTIONS = ("decisions", "outcome", "evaluation", "options", "verdict")
FOLDER = Path(__file__).parent / "plans"
WIDTH = 120
SHOWN = 12  # differences, of which there may be hundreds


def load(case: str) -> dict[str, Any]:
    """The golden record of a case; empty where there is none."""
    path = FOLDER / f"{case}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def save(case: str, record: dict[str, Any], sections: Collection[str]) -> None:
    """Write these sections of a record, keeping the others that its file has."""
    kept = load(case)
    merged = {name: (record if name in sections else kept).get(name) for name in SECTIONS}
    text = _text({name: value for name, value in merged.items() if value is not None}, "")
    (FOLDER / f"{case}.json").write_text(text + "\n")


def differences(golden: Any, found: Any, path: str, *, shared: bool = False) -> Iterator[str]:
    """Where two JSON values differ, and how: floats by more than 1e-9 of them; `shared`: in keys that both have."""
    if isinstance(golden, dict) and isinstance(found, dict):
        for key in {**golden, **found}:
            if key in golden and key in found:
                yield from differences(golden[key], found[key], f"{path}.{key}", shared=shared)
            elif not shared:
                yield f"{path}.{key}: {'only golden' if key in golden else 'not golden'}"
    elif isinstance(golden, list) and isinstance(found, list) and len(golden) == len(found):
        for i, pair in enumerate(zip(golden, found, strict=True)):
            yield from differences(*pair, f"{path}[{i}]", shared=shared)
    elif not _alike(golden, found):
        yield f"{path}: golden {golden!r:.200}, found {found!r:.200}"


def _alike(golden: Any, found: Any) -> bool:
    if isinstance(golden, float) and isinstance(found, float):
        return math.isclose(golden, found, rel_tol=1e-9, abs_tol=1e-12)
    return type(golden) is type(found) and bool(golden == found)


def _text(value: Any, indent: str) -> str:
    """JSON with lists of plain values, and what is short and hardly nested, each on a line."""
    line, inner = json.dumps(value, allow_nan=False), indent + " "
    items = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    deep = any(isinstance(item, dict | list) and item for item in items)
    if not items or (not deep and (isinstance(value, list) or len(indent + line) <= WIDTH)):
        return line
    names = [f"{json.dumps(name)}: " for name in value] if isinstance(value, dict) else [""] * len(items)
    first, last = "{}" if isinstance(value, dict) else "[]"
    lines = (f"{inner}{name}{_text(item, inner)}" for name, item in zip(names, items, strict=True))
    return f"{first}\n" + ",\n".join(lines) + f"\n{indent}{last}"
