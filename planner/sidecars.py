"""The files that lie beside a plan, which it names by their hash: written with it, and gone with it."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import MoeplanError, StorageError
from ..files import MAX_JSON_BYTES, atomic_path, sha256_file
from ..runtime.decisions import sidecars_in
from ..runtime.plan import Plan, load, save

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
        for sidecar in appearing:  # a plan that names it is there where only the end of this call was cut off
            if not _is_named(sidecar):
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
    """The files that the plan at `path` names and that have the names and the contents that solve gave them."""
    with contextlib.suppress(MoeplanError, OSError):
        plan = load(path)
        for named in sidecars_in((plan.decisions, plan.options)):
            if re.fullmatch(rf"[a-z]+-{named.sha256[:16]}\.safetensors", named.file):
                with contextlib.suppress(MoeplanError, OSError):
                    if sha256_file(path.parent / named.file) == named.sha256:
                        yield path.parent / named.file


def _is_named(sidecar: Path) -> bool:
    """Whether a file beside it may be a plan that names it, or cannot be read."""
    try:
        beside = [path for path in sidecar.parent.iterdir() if path.is_file() and path != sidecar]
        texts = (path.read_bytes() for path in beside if path.stat().st_size <= MAX_JSON_BYTES)
        return any(sidecar.name.encode() in text for text in texts)
    except OSError:
        return True
