"""The result of a subject's run as it is saved: its sections of rows, where they were measured and of which commit."""

import os
import platform
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from pydantic import TypeAdapter

from moeplan.errors import UsageError
from moeplan.files import read_json, write_json

from .study import PAGES, Row

PACKAGES = ("moeplan", "numpy", "scipy", "ortools", "pulp", "numba", "torch")
ROOT = Path(__file__).parents[1]
SAVED = "docs/benchmarks"  # where results go: changes there are no others' figures
TOLD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A study that ran, or why it did not (`skipped`)."""

    title: str
    quality: str
    baseline: str
    note: str
    skipped: str = ""
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where and when: the machine, the versions, the commit ("+" where the tree differs), loads over one minute."""

    cpu: str
    cores: int
    python: str
    packages: dict[str, str]
    commit: str
    date: str
    load_at_start: float
    load_at_end: float

    @classmethod
    def of(cls, load_at_start: float) -> "Environment":
        """Environment of this process, now at its end."""
        return cls(
            cpu=_cpu(),
            cores=os.cpu_count() or 1,
            python=platform.python_version(),
            packages={name: version(name) for name in PACKAGES if find_spec(name)},
            commit=commit(),
            date=datetime.now(UTC).date().isoformat(),
            load_at_start=load_at_start,
            load_at_end=round(os.getloadavg()[0], 2),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A subject's run."""

    schema_version: Literal[1]
    subject: str
    about: str
    form: str
    environment: Environment
    sections: list[Section]


def save(result: Result, path: Path) -> None:
    """Write a result as JSON."""
    write_json(path, TypeAdapter(Result).dump_python(result, mode="json", exclude_defaults=True))


def load(path: Path) -> Result:
    """Read a result."""
    return TypeAdapter(Result).validate_python(read_json(path, what="benchmark result"))


def commit(root: Path = ROOT) -> str:
    """The commit's name, "+" after it where other files than saved results are changed or new; or "unknown"."""
    name = _git(root, "rev-parse", "--short=12", "HEAD")
    return "unknown" if name is None else name.strip() + ("+" if _changes(root) else "")


def refuse_changes(root: Path = ROOT) -> None:
    """Raise a UsageError unless all files but saved results are those of a commit."""
    if commit(root) == "unknown":
        raise UsageError(f"--save in {root}, which has no git commit; expected a checkout, run it there")
    if changes := _changes(root):
        more = f" and {len(changes) - TOLD} more" if len(changes) > TOLD else ""
        raise UsageError(
            f"--save with uncommitted changes ({', '.join(changes[:TOLD])}{more}); figures name their commit: expected"
            f" none outside {SAVED}; commit them first"
        )


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{torch.cuda.get_device_name()}, {cpu}" if torch.cuda.is_available() else cpu


def _changes(root: Path) -> list[str]:
    saved = [SAVED, *(os.path.normpath(f"{SAVED}/{page}") for page in PAGES.values())]
    others = [f":(exclude){path}" for path in saved]
    found = _git(root, "status", "--porcelain", "--no-renames", "--", ".", *others) or ""
    return [line[3:] for line in found.splitlines()]


def _git(root: Path, *args: str) -> str | None:
    done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout
