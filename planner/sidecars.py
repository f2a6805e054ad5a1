"""The files that lie beside a plan, which it names by their hash: written with it, and gone with it."""

from collections.abc import Mapping
from pathlib import Path

from ..errors import MoeplanError, StorageError
from ..files import MAX_JSON_BYTES, atomic_path, sha256_file
from ..runtime.plan import Plan, load, save

__all__ = ["save_with"]


def save_with(sidecars: Mapping[str, bytes], plan: Plan, path: Path) -> None:
    """Write a plan and, first, its sidecars, name to contents; the replaced plan's own goes unless it is still named.

    Raises
    ------
    StorageError
        One of them cannot be written; what was there stays as it was.
    """
    replaced, appearing = _predictor_of(path), list[Path]()
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
    if replaced is not None and replaced.name not in sidecars and not _is_named(replaced):
        replaced.unlink(missing_ok=True)


def _write_beside(path: Path, name: str, contents: bytes) -> None:
    try:
        with atomic_path(path.parent / name) as temporary:
            temporary.write_bytes(contents)
    except StorageError as error:
        raise StorageError(f"{path}: its {name} beside it cannot be written ({error.__cause__ or error})") from error


def _predictor_of(path: Path) -> Path | None:
    """The predictor of the plan at `path`, if it has the name and the contents that solve gave it."""
    try:
        policy = load(path).decisions.sample_policy
        if policy is None or policy.predictor is None:
            return None
        found, digest = path.parent / policy.predictor.file, policy.predictor.sha256
        given = found.name == f"predictor-{digest[:16]}.safetensors"
        return found if given and sha256_file(found) == digest else None
    except (MoeplanError, OSError):
        return None


def _is_named(sidecar: Path) -> bool:
    """Whether a file beside it may be a plan that names it, or cannot be read."""
    try:
        beside = [path for path in sidecar.parent.iterdir() if path.is_file() and path != sidecar]
        texts = (path.read_bytes() for path in beside if path.stat().st_size <= MAX_JSON_BYTES)
        return any(sidecar.name.encode() in text for text in texts)
    except OSError:
        return True
