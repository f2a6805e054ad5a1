"""The files that lie beside a plan, which it names by their hash: written with it, and gone with it.

The proof of a thorough bound is one: the prices that give it (`solvers.bounds.triples`), by level, "device" or "node".
"""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, MoeplanError, StorageError
from ..files import MAX_JSON_BYTES, atomic_path, sha256_file
from ..runtime.decisions import sidecars_in
from ..runtime.plan import Plan, load, save

Prices = NDArray[np.float64]  # and floors of a level, by MoE layer and expert [L, E, E+4]
LEVELS = ("device", "node")
MOST_HEADER_BYTES = 4096
MOST_PRICE = 1e18  # sums stay finite


def save_with(sidecars: Mapping[str, bytes], plan: Plan, path: Path) -> None:
    """Write a plan and, first, its sidecars, name to contents; the replaced plan's own goes unless it is still named.

    StorageError where one of them cannot be written; what was there stays as it was.
    """
    replaced, appearing = list(_sidecars_of(path)), list[Path]()
    try:
        with atomic_path(path) as temporary:
            save(plan, temporary)
            for name, contents in sidecars.items():
                if not (path.parent / name).exists():
                    appearing.append(path.parent / name)
                try:
                    with atomic_path(path.parent / name) as beside:
                        beside.write_bytes(contents)
                except StorageError as error:
                    words = f"its {name} beside it cannot be written ({error.__cause__ or error})"
                    raise StorageError(f"{path}: {words}") from error
    except BaseException:
        for sidecar in appearing:  # a plan that names it is there where only the end of this call was cut off
            if not _is_named(sidecar):
                sidecar.unlink(missing_ok=True)
        raise
    for old in replaced:
        if old.name not in sidecars and not _is_named(old):
            old.unlink(missing_ok=True)


def dump_proof(levels: Mapping[str, Prices]) -> bytes:
    """Dump a proof as a safetensors file, the same bytes every time."""
    from safetensors.numpy import save as dump

    return dump({name: np.ascontiguousarray(table) for name, table in levels.items()})


def parse_proof(contents: bytes, shape: tuple[int, int, int]) -> Mapping[str, Prices]:
    """Parse a proof whose levels have this shape; `InputError` where it is damaged, something else, or too large."""
    from safetensors import SafetensorError
    from safetensors.numpy import load as parse

    expected = f"expected device or node float64 {list(shape)}, within {MOST_PRICE:g}"
    if len(contents) > MOST_HEADER_BYTES + 8 * len(LEVELS) * math.prod(shape):
        raise InputError(f"no proof of this plan's bound in {len(contents):,} bytes; {expected}")
    try:
        levels: dict[str, Prices] = parse(contents)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"damaged proof of a bound ({str(error)[:80]}); {expected}") from error
    for name, table in levels.items():
        alike = name in LEVELS and table.dtype == np.float64 and table.shape == shape
        if not alike or not (np.abs(table) <= MOST_PRICE).all():
            raise InputError(f"proof of a bound with {name[:20]!r} {table.dtype} {list(table.shape)}; {expected}")
    return levels


def _sidecars_of(path: Path) -> Iterator[Path]:
    """The files that the plan at `path` names and that have the names and the contents that solve gave them."""
    with contextlib.suppress(MoeplanError, OSError):
        plan = load(path)
        for named in sidecars_in((plan.decisions, plan.options)):
            if re.fullmatch(rf"[a-z]+-{named.sha256[:16]}\.safetensors", named.file):
                with contextlib.suppress(MoeplanError, OSError):
                    if sha256_file(path.parent / named.file) == named.sha256:
                        yield path.parent / named.file


def _is_named(sidecar: Path) -> bool:
    """Check whether a file beside it may be a plan that names it, or cannot be read."""
    try:
        beside = [path for path in sidecar.parent.iterdir() if path.is_file() and path != sidecar]
        texts = (path.read_bytes() for path in beside if path.stat().st_size <= MAX_JSON_BYTES)
        return any(sidecar.name.encode() in text for text in texts)
    except OSError:
        return True
