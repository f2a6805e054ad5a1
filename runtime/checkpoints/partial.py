"""A directory that is filled file by file beside its destination, takes its place when complete, and outlives a kill.

A journal notes each complete file; another run of the same job goes on from there.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...errors import InputError, StorageError, UsageError
from ...files import read_json, validated, write_json
from ..decisions import Record, Sha256

JOURNAL, LOCK, SCRATCH = ".moeplan-journal.json", ".moeplan-lock", ".moeplan-part"  # hidden files are never copied
SPARE_BYTES = 2**20  # for the journal, directories, and headers that grow


class Journal(Record):
    """The complete files of a job by name, with the hash that belongs to each."""

    job: str
    done: Mapping[str, Sha256]


class Partial:
    """A directory being filled.

    Parameters
    ----------
    job
        Hash of the job: files of another job are swept away.

    Attributes
    ----------
    scratch
        Where to write a file until it is complete.
    done
        The complete files by name, with the hash that belongs to each.
    """

    def __init__(self, path: Path, job: str) -> None:
        self.path, self.job, self.scratch = path, job, path / SCRATCH
        self.done = self._journal()
        for root, _, files in os.walk(path, topdown=False):
            for file in (Path(root, name) for name in files):
                if file.name not in (JOURNAL, LOCK) and file.relative_to(path).as_posix() not in self.done:
                    file.unlink()
            if Path(root) != path and not os.listdir(root):
                os.rmdir(root)

    def add(self, name: str, sha256: str) -> None:
        """Give a complete file in `scratch` its name, and note its hash."""
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        self.scratch.replace(self.path / name)
        self.done[name] = sha256
        write_json(self.path / JOURNAL, {"job": self.job, "done": self.done})

    def forget(self, name: str) -> None:
        """Remove a file that is not as noted."""
        self.done.pop(name, None)
        (self.path / name).unlink(missing_ok=True)

    def check_space(self, num_bytes: int) -> None:
        """Refuse to begin where the disk is too small.

        Raises
        ------
        StorageError
            So many bytes are not free, and how many are missing.
        """
        free, needed = shutil.disk_usage(self.path).free, num_bytes + SPARE_BYTES
        if free < needed:
            raise StorageError(
                f"{self.path.parent}: {free:,} bytes free, {needed:,} needed: {needed - free:,} are missing; free them"
                " or choose a directory on another disk"
            )

    def _journal(self) -> dict[str, str]:
        """The complete files of this job, by name; none where the journal is another job's."""
        path, what = self.path / JOURNAL, "a journal"
        try:
            noted = validated(Journal, read_json(path, what=what), source=str(path), what=what)
        except InputError:
            return {}
        return dict(noted.done) if noted.job == self.job else {}


@contextlib.contextmanager
def filling(destination: str | os.PathLike[str], job: str) -> Iterator[Partial]:
    """Yield the directory to fill, which becomes `destination` when the block ends well.

    When the block is interrupted or the disk full, what is complete is kept for another run; else it goes.

    Raises
    ------
    UsageError
        The destination is there and not empty, or another process is filling it.
    StorageError
        It cannot be written.
    """
    target = Path(os.path.realpath(destination))
    path = target.parent / f".{target.name}.partial"
    partial = None
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise UsageError(f"{destination}: already there and not empty; choose another destination or remove it")
        if target.is_mount():
            raise UsageError(f"{destination}: a disk is mounted there; choose a new directory on it")
        with _locked(path):
            partial = Partial(path, job)
            yield partial
            path.replace(target)
            (target / JOURNAL).unlink(missing_ok=True)
            (target / LOCK).unlink()
    except OSError as error:
        kept = _keep(partial)
        raise StorageError(f"{destination}: cannot be written ({error.strerror or error}); {kept}") from error
    except (KeyboardInterrupt, SystemExit, StorageError) as error:
        error.add_note(_keep(partial))
        raise
    except BaseException:
        if partial is not None:
            shutil.rmtree(path, ignore_errors=True)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the only right to fill a directory, which is made."""
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()) and not (path / LOCK).is_file():
        raise UsageError(f"{path}: in the way and not ours; move it elsewhere")
    with open(path / LOCK, "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{path}: another process is filling it; wait for it") from error
        yield


def _keep(partial: Partial | None) -> str:
    """Keep the complete files, if any, and say so."""
    if partial is None:
        return "nothing was changed"
    partial.scratch.unlink(missing_ok=True)
    if not partial.done:
        shutil.rmtree(partial.path, ignore_errors=True)
        return "nothing was changed"
    return f"what is complete is kept in {partial.path}: run again to go on"
