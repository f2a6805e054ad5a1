"""Files on disk: atomic writes, canonical JSON, hashes, and reading that checks kind and size first."""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import InputError, MoeplanError, StorageError, UsageError, printable

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    Kind = TypeVar("Kind", bound=BaseModel)

MAX_JSON_BYTES = 256 * 2**20
MAX_DIGITS = 64
EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)e[-+]?[0-9]+$", re.IGNORECASE)  # YAML 1.1: dot and sign
MAX_REASON = 240  # characters of a refusal, which may quote the file
_placed = dict[Path, int]()  # files and directories, by the inode that is to be there


# A key that one kind of our files alone has, and the command that writes them.
_WRITTEN = {"a plan": ("decisions", "moeplan solve"), "a profile": ("series", "moeplan profile")}


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path` that replaces it when the block ends well.

    Raises
    ------
    StorageError
        There is something else than a file, the directory cannot be written or the disk is full; nothing is left
        behind.
    """
    target = Path(path)
    with _appearing(target, directory=False) as temporary:
        _check_replaceable(target, directory=False)
        yield temporary


def check_target(path: str | os.PathLike[str], *, directory: bool = False) -> None:
    """Refuse, before long work, a path where `atomic_path` or `atomic_directory` could make nothing.

    Raises
    ------
    UsageError
        A directory is asked for, and there is something that is no empty one.
    StorageError
        There is something else than a file, or no directory above that can be written, for any reason.
    """
    target = Path(path)
    try:
        _check_replaceable(target, directory=directory)
        with tempfile.TemporaryFile(dir=next(parent for parent in target.absolute().parents if parent.exists())):
            pass
    except OSError as error:
        raise StorageError(f"{target}: cannot be written ({error.strerror})") from error


@contextlib.contextmanager
def atomic_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary directory beside `path` that becomes it when the block ends well.

    Raises
    ------
    UsageError
        There is something, and it is no empty directory.
    StorageError
        It cannot be written; nothing is left behind.
    """
    target = Path(path)
    with _appearing(target, directory=True) as temporary:
        _check_replaceable(target, directory=True)
        yield temporary


def written() -> list[Path]:
    """Files and directories that this process wrote whole and that are still there."""
    return [path for path, inode in _placed.items() if path.exists() and path.stat().st_ino == inode]


def canonical_json(value: Any) -> bytes:
    """`value` as JSON with sorted keys and no spaces; equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as readable JSON, atomically."""
    text = json.dumps(value, indent=1, allow_nan=False)
    with atomic_path(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def size_of(path: str | os.PathLike[str], *, what: str) -> int:
    """The bytes of a regular file, looked at before it is opened: a pipe or a device could block or never end.

    Parameters
    ----------
    what
        Word for the file, in the message: "a plan".

    Raises
    ------
    InputError
        It is missing, or no regular file.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        hint = f"; make one with {_WRITTEN[what][1]}" if what in _WRITTEN else ""
        raise InputError(f"{path}: cannot be read as {what} ({reason}){hint}") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe or device"
        raise InputError(f"{path}: cannot be read as {what} ({kind}, expected a regular file)")
    return status.st_size


def read_text(path: str | os.PathLike[str], *, what: str, max_bytes: int) -> str:
    """The text of a UTF-8 file; `what` as in `size_of`.

    Raises
    ------
    InputError
        It is missing, no regular file, larger than `max_bytes` or not UTF-8.
    """
    if (size := size_of(path, what=what)) > max_bytes:
        raise InputError(f"{path}: {size:,} bytes, expected {what} of at most {max_bytes:,}")
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read as {what} ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not {what}: not UTF-8 at byte {error.start:,}") from error


def read_json(path: str | os.PathLike[str], *, what: str, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value in the JSON file `path`, refusing NaN, infinity, duplicate keys, deep nesting and absurd sizes.

    Parameters
    ----------
    what
        Word for the file, in the message: "a plan".
    """
    text = read_text(path, what=what, max_bytes=max_bytes)
    try:
        return json.loads(
            text, parse_constant=_refuse, parse_float=_finite, parse_int=_whole, object_pairs_hook=_unique_keys
        )
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        if isinstance(error, json.JSONDecodeError) and not text.rstrip().endswith(("}", "]")):
            reason = f"{reason}; the file is empty, or its end is missing: write or copy it again"
        raise InputError(f"{path}: not {what}: {reason}") from error


def read_yaml(path: str | os.PathLike[str], *, what: str, max_bytes: int) -> Any:
    """The value in the YAML file `path`, of plain types, refusing mappings that name a key twice; `what` as above.

    `1e6` is a number, as in YAML 1.2 and JSON; to YAML 1.1 it is a text.
    In pure Python, 20 us a number: libyaml's parser crashes on deep nesting.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Safe YAML whose mappings name a key once, and that takes no longer than its bytes do."""

        def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
            if node.tag.endswith((":int", ":float")) and len(node.value) > MAX_DIGITS:  # in base 60 these take minutes
                raise yaml.constructor.ConstructorError(None, None, "a number of too many digits", node.start_mark)
            return str(super().construct_scalar(node))

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            keys = [key for key, _ in node.value]
            if not all(isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge") for key in keys):
                raise yaml.constructor.ConstructorError(None, None, "a key that is no name", node.start_mark)
            if len({key.value for key in keys}) != len(keys):
                raise yaml.constructor.ConstructorError(None, None, "a mapping names a key twice", node.start_mark)
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, [*"+-.0123456789"])
    text = read_text(path, what=what, max_bytes=max_bytes)
    try:
        return yaml.load(text, Loader)  # noqa: S506  a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError, AttributeError, LookupError, TypeError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise InputError(f"{path}: not YAML: {reason[:160]}") from error


def validated(kind: "type[Kind]", value: Any, *, source: str, what: str) -> "Kind":
    """`value` as a pydantic model of `kind`: bytes are JSON, anything else has been decoded; types are not coerced.

    Parameters
    ----------
    source
        Where the value is from, for the message: a path.
    what
        Word for the value, in the message: "a plan".

    Raises
    ------
    InputError
        In one line of bounded length: the problem nested deepest, which in a union is that of the form that was meant,
        and how many there are; or the rule of ours that the value breaks.
    """
    from pydantic import ValidationError

    try:
        if isinstance(value, bytes):
            return kind.model_validate_json(value, strict=True)
        return kind.model_validate(value, strict=True)
    except ValidationError as error:
        reason = _problem(error, what)
        raise InputError(f"{source}: {reason}") from error
    except MoeplanError as error:
        raise InputError(f"{source}: {bounded(str(error))}") from error


def check_kind(value: Any, *, source: str, what: str) -> None:
    """Refuse a decoded JSON value that is not `what`, "a plan" or "a profile", of any schema version; as `validated`.

    Raises
    ------
    InputError
        The file has no schema version, or is of the other kind.
    """
    _, writer = _WRITTEN[what]
    if not isinstance(value, dict) or "schema_version" not in value:
        raise InputError(f"{source}: no schema_version; expected {what} written by {writer}")
    actual = next((kind for kind, (key, _) in _WRITTEN.items() if key in value), what)
    if actual != what:
        raise InputError(f"{source}: {actual}; expected {what}, written by {writer}")


def sha256_file(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """The SHA-256 of `value`'s canonical JSON, in hex."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


@contextlib.contextmanager
def _appearing(target: Path, *, directory: bool) -> Iterator[Path]:
    """A temporary file or directory beside `target` that becomes it when the block ends well, else goes."""
    temporary: Path | None = None
    missing = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if directory:
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        else:
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            os.close(handle)
            temporary = Path(name)
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod((0o777 if directory else 0o666) & ~umask)
        _placed[target] = temporary.stat().st_ino
        temporary.replace(target)
    except StorageError as error:  # of a file inside the directory
        raise StorageError(str(error).replace(str(temporary), str(target))) from error
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # Arrow has words of its own for a full disk
        raise StorageError(f"{target}: cannot be written ({reason}); nothing was changed") from error
    finally:
        if temporary is not None and directory:
            shutil.rmtree(temporary, ignore_errors=True)
        elif temporary is not None:
            temporary.unlink(missing_ok=True)
        for parent in missing:
            with contextlib.suppress(OSError):  # it holds something
                parent.rmdir()


def _check_replaceable(target: Path, *, directory: bool) -> None:
    if not target.exists():
        return
    if directory and (not target.is_dir() or any(target.iterdir())):
        what = "not empty" if target.is_dir() else "no directory"
        raise UsageError(f"{target}: already there and {what}; choose another destination or remove it")
    if not directory and not target.is_file():
        raise StorageError(f"{target}: already there and no regular file; choose another name")


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a finite number")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        _refuse(text[:20])
    return number


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text):,} digits, expected at most {MAX_DIGITS}")
    return int(text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("an object names a key twice")
    return keys


def _problem(error: "ValidationError", what: str) -> str:
    """Problem of a value, on one line."""
    problems = error.errors()
    deepest = max(problems, key=lambda problem: len(problem["loc"]))
    version = next((problem for problem in problems if problem["loc"] == ("schema_version",)), None)
    if version is not None:
        expected = version.get("ctx", {}).get("expected", "one")
        return f"{what} of schema version {bounded(repr(version['input']))}; this moeplan reads {expected}"
    where = ".".join(map(str, deepest["loc"])) or "value"
    return f"not {what}: {bounded(where, 80)}: {bounded(deepest['msg'])} ({len(problems)} problems)"


def bounded(text: str, most: int = MAX_REASON) -> str:
    """`text` as one line of bounded length."""
    line = printable(" ".join(text[: 2 * most].split()))
    return line if len(line) <= most else f"{line[:most]}..."
