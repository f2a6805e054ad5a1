"""Files on disk: atomic writes, canonical JSON, hashes, and reading that checks sizes first."""

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import InputError, StorageError

__all__ = ["atomic_path", "canonical_json", "read_json", "sha256_file", "sha256_json", "write_json"]

MAX_JSON_BYTES = 256 * 2**20


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path` that replaces it when the block ends well.

    Raises
    ------
    StorageError
        The directory cannot be written or the disk is full; nothing is left behind.
    """
    target = Path(path)
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)
    except OSError as error:
        raise StorageError(f"{target}: cannot be written ({error.strerror or error}); nothing was changed") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def canonical_json(value: Any) -> bytes:
    """`value` as JSON with sorted keys and no spaces; equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as readable JSON, atomically."""
    text = json.dumps(value, indent=1, allow_nan=False)
    with atomic_path(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: str | os.PathLike[str], *, what: str, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value in the JSON file `path`, refusing NaN, infinity, duplicate keys, deep nesting and absurd sizes.

    Parameters
    ----------
    what
        What the file should be, for the message: "a plan".
    """
    try:
        size = Path(path).stat().st_size
        if size > max_bytes:
            raise InputError(f"{path}: {size:,} bytes, expected {what} of at most {max_bytes:,}")
        text = Path(path).read_text(encoding="utf-8")
        return json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique_keys)
    except OSError as error:
        raise InputError(f"{path}: cannot be read as {what} ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not {what}: {_reason(error)}") from error


def sha256_file(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """The SHA-256 of `value`'s canonical JSON, in hex."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a finite number")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        _refuse(text[:20])
    return number


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("an object names a key twice")
    return keys


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
