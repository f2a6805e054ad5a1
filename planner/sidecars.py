"""The files that lie beside a plan, which it names by their hash: written with it, and gone with it."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import MoeplanError, StorageError
from ..files import MAX_JSON_BYTES, atomic_path, sha256_file
from ..runtime.decisions import SidecarFile
from ..runtime.plan import Plan, load, save
from .options import Search, parsed

__all__ = ["save_with"]


def save_with(sidecars: Mapping[str, bytes], plan: Plan, path: Path) -> None:
    """Write a plan and, first, its sidecars, name to contents; the replaced plan's own goes unless it is still named.

    Raises
    ------
    StorageError
        One of them cannot be written; what was there stays as it was.
    """
    replaced, appearing = list(_sidecars_of(path)), list[Path]()
    try:
        with atomic_path(path) as temporary:
            save(plan, temporary)
            for name, contents in sidecars.items():
                if not (path.parent / name).exists():
                    appearing.append(path.parent / name)
                _write_beside(path, name, contents)
    except BaseException:
        for sidecar in appearing:
            sidecar.unlink(missing_ok=True)
        raise
    for old in replaced:
        if old.name not in sidecars and not _is_named(old):
            old.unlink(missing_ok=True)


def _write_beside(path: Path, name: str, contents: bytes) -> None:
    try:
        with atomic_path(path.parent / name) as temporary:
            temporary.write_bytes(contents)
    except StorageError as error:
        raise StorageError(f"{path}: its {name} beside it cannot be written ({error.__cause__ or error})") from error


def _sidecars_of(path: Path) -> Iterator[Path]:
    """The predictor and the proof of the plan at `path` that have the names and the contents that solve gave them."""
    with contextlib.suppress(MoeplanError, OSError):
        plan = load(path)
        named = list[tuple[str, SidecarFile | None]]()
        if (policy := plan.decisions.sample_policy) is not None:
            named.append(("predictor", policy.predictor))
        if (search := plan.options.get("placement", {}).get("search")) is not None:
            named.append(("bound", parsed(Search, search, "placement.search").proof))
        for kind, one in named:
            if one is not None and one.file == f"{kind}-{one.sha256[:16]}.safetensors":
                with contextlib.suppress(MoeplanError, OSError):
                    if sha256_file(path.parent / one.file) == one.sha256:
                        yield path.parent / one.file


def _is_named(sidecar: Path) -> bool:
    """Whether a file beside it may be a plan that names it, or cannot be read."""
    try:
        beside = [path for path in sidecar.parent.iterdir() if path.is_file() and path != sidecar]
        texts = (path.read_bytes() for path in beside if path.stat().st_size <= MAX_JSON_BYTES)
        return any(sidecar.name.encode() in text for text in texts)
    except OSError:
        return True
