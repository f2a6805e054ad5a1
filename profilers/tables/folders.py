"""Finding tables: `SYSTEM/KIND/FRAMEWORK/VERSION/NAME.parquet`, or `SYSTEM/comm/nccl/VERSION/nccl_perf.parquet`."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ...errors import InputError, UsageError

__all__ = ["TableFile", "newest_table", "system_folder"]

FRAMEWORKS = ("vllm", "sglang", "trtllm")  # most wanted first, then any other by name
KINDS = ("comm", "gemm", "moe")


@dataclass(frozen=True, slots=True)
class TableFile:
    """A table's file, with the names that its folders give: what its rows say of themselves is not asked."""

    path: Path
    framework: str
    version: str

    @property
    def name(self) -> str:
        """For people: "gemm vllm 0.19.0"."""
        return f"{self.path.stem.removesuffix('_perf')} {self.framework} {self.version}"


def system_folder(directory: str | os.PathLike[str], system: str) -> Path:
    """The folder of a system.

    Raises
    ------
    InputError
        `directory` cannot be read or holds no system.
    UsageError
        There are others than this one; they are named.
    """
    try:
        systems = {folder.name: folder for folder in sorted(Path(directory).iterdir()) if _holds_tables(folder)}
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{directory}: cannot be read as a folder of systems' tables ({reason})") from error
    if not systems:
        raise InputError(f"{directory}: no system's tables; expected SYSTEM/comm, SYSTEM/gemm or SYSTEM/moe")
    if system not in systems:
        raise UsageError(f"system {system!r}; {directory} has {', '.join(systems)}")
    return systems[system]


def newest_table(system: Path, kind: str, name: str) -> TableFile | None:
    """The newest version of a table, of the most wanted framework that has it; None where none has."""
    tables = [
        TableFile(path, path.parent.parent.name, path.parent.name)
        for path in sorted(system.glob(f"{kind}/*/*/{name}.parquet"))
    ]
    return max(tables, key=lambda table: (_wanted(table.framework), _age(table.version)), default=None)


def _holds_tables(folder: Path) -> bool:
    return any((folder / kind).is_dir() for kind in KINDS)


def _wanted(framework: str) -> tuple[int, str]:
    place = FRAMEWORKS.index(framework) if framework in FRAMEWORKS else len(FRAMEWORKS)
    return -place, framework


def _age(version: str) -> tuple[list[int], int, list[int], str]:
    """A sort key: the release's numbers, then before it (rc), at it, after it (post)."""
    release = re.match(r"\d+(\.\d+)*", version)
    rest = version[release.end() if release else 0 :]
    stage = 0 if not rest else 1 if "post" in rest else -1
    numbers = [int(number) for number in re.findall(r"\d{1,18}", rest)]
    return [int(number[:18]) for number in release[0].split(".")] if release else [], stage, numbers, version
