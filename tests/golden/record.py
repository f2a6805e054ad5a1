"""A golden record: the JSON file of a case, one key a section, and in what another record differs from it."""

import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

__all__ = ["SECTIONS", "differences", "load", "save"]

SECTIONS = ("decisions", "outcome", "evaluation", "options", "verdict")
FOLDER = Path(__file__).parent / "plans"
WIDTH = 120


def load(case: str) -> dict[str, Any]:
    """The golden record of a case; empty where there is none."""
    path = FOLDER / f"{case}.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return record


def save(case: str, record: dict[str, Any], sections: Collection[str]) -> None:
    """Write these sections of a record, keeping the others that its file has."""
    kept, record = load(case), json.loads(json.dumps(record))
    merged = {name: (record if name in sections else kept).get(name) for name in SECTIONS}
    text = _text({name: value for name, value in merged.items() if value is not None}, "")
    (FOLDER / f"{case}.json").write_text(text + "\n")


def differences(golden: Any, found: Any, path: str = "", *, shared: bool = False) -> Iterator[str]:
    """Where two JSON values differ and how: floats by more than 1e-9 of them, all else at all.

    Parameters
    ----------
    shared
        Whether keys that only one of two objects has do not count.
    """
    if isinstance(golden, dict) and isinstance(found, dict):
        for key in [*golden, *(key for key in found if key not in golden)]:
            if key in golden and key in found:
                yield from differences(golden[key], found[key], f"{path}.{key}", shared=shared)
            elif not shared:
                yield f"{path}.{key}: {'only golden' if key in golden else 'not golden'}"
    elif isinstance(golden, list) and isinstance(found, list) and len(golden) == len(found):
        for i, (one, other) in enumerate(zip(golden, found, strict=True)):
            yield from differences(one, other, f"{path}[{i}]", shared=shared)
    elif not _alike(golden, found):
        yield f"{path}: golden {golden!r:.200}, found {found!r:.200}"


def _alike(golden: Any, found: Any) -> bool:
    if isinstance(golden, float) and isinstance(found, float):
        return math.isclose(golden, found, rel_tol=1e-9, abs_tol=1e-12)
    return type(golden) is type(found) and bool(golden == found)


def _text(value: Any, indent: str) -> str:
    """JSON with lists of plain values on a line, and all else that fits into one."""
    line = json.dumps(value, allow_nan=False)
    nested = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    plain_list = isinstance(value, list) and not any(isinstance(item, dict | list) for item in nested)
    deep = any(isinstance(item, dict | list) and item for item in nested)
    if plain_list or (not deep and len(indent) + len(line) <= WIDTH) or not nested:
        return line
    inner = indent + " "
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(key)}: {_text(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _text(item, inner) for item in value) + f"\n{indent}]"
