"""Reading NVIDIA aiconfigurator's tables of one system as a Profile."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ...errors import InputError, UsageError
from ..cluster import Cluster
from ..origin import Origin, now
from ..profile import Profile
from ..series import Series
from ..topology import measured_links
from .collectives import deepep_series, nccl_series
from .kernels import gemm_series, moe_series

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
        """Name to print, such as "gemm vllm 0.19.0"."""
        return f"{self.path.stem.removesuffix('_perf')} {self.framework} {self.version}"


def read_tables(directory: str | os.PathLike[str], system: str) -> Profile:
    """The profile that published tables give of a system.

    Parameters
    ----------
    directory
        Of aiconfigurator's layout, a folder a system: `SYSTEM/comm/nccl/VERSION/nccl_perf.parquet`,
        `SYSTEM/gemm/FRAMEWORK/VERSION/gemm_perf.parquet`, `SYSTEM/moe/FRAMEWORK/VERSION/moe_perf.parquet`,
        `SYSTEM/comm/sglang/VERSION/wideep_deepep_{normal,ll}_perf.parquet`. Missing tables are missing series.
    system
        The folder's name: "h100_sxm".

    Returns
    -------
    Profile
        One node of as many devices as the largest collective had, its "intra" link the alpha-beta line of their
        all-to-all; origin "tables", whose name tells which were read. Of each table that is the newest version by its
        folder's name, of vllm, sglang, trtllm, else another framework; versions and frameworks are never mixed. Rows
        of equal size are one size at their median. Large tables leave their fits but no measurements.

    Raises
    ------
    InputError
        There is no table here, or one is damaged.
    UsageError
        There are other systems than this one; they are named.

    References
    ----------
    https://github.com/ai-dynamo/aiconfigurator, `systems/data`.
    """
    folder = system_folder(directory, system)
    read: list[TableFile] = []
    series: list[Series] = []

    def take(kind: str, name: str, parse: Callable[[Path], list[Series]]) -> None:
        if table := newest_table(folder, kind, name):
            series.extend(one for one in parse(table.path) if one.fit)
            read.append(table)

    take("comm", "nccl_perf", nccl_series)
    num_devices = max((one.ranks for one in series), default=1)
    take("gemm", "gemm_perf", gemm_series)
    take("moe", "moe_perf", moe_series)
    take("comm", "wideep_deepep_normal_perf", partial(deepep_series, low_latency=False, ranks=num_devices))
    take("comm", "wideep_deepep_ll_perf", partial(deepep_series, low_latency=True, ranks=num_devices))
    if not series:
        raise InputError(f"{folder}: no table with two sizes; expected nccl_perf, gemm_perf or moe_perf.parquet")
    cluster = Cluster(1, num_devices)
    links = measured_links(cluster, {one.key: one for one in series})
    origin = Origin(kind="tables", created_at=now(), name=f"{system}: {', '.join(one.name for one in read)}")
    return Profile.of(origin, replace(cluster, links=links), series)


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
