"""A directory that appears whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import StorageError, UsageError

__all__ = ["new_directory"]


@contextmanager
def new_directory(destination: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary directory beside `destination` that becomes it when the block ends well.

    Raises
    ------
    UsageError
        The destination is there and not an empty directory.
    StorageError
        It cannot be written; nothing is left behind.
    """
    target = Path(destination)
    temporary: Path | None = None
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise UsageError(f"{target}: already there and not empty; choose another destination or remove it")
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        temporary.replace(target)
    except StorageError as error:
        raise StorageError(str(error).replace(str(temporary), str(target))) from error
    except OSError as error:
        raise StorageError(f"{target}: cannot be written ({error.strerror or error}); nothing was changed") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
