"""Reading NVIDIA aiconfigurator's tables of one system as a Profile."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...errors import InputError
from ..cluster import Cluster
from ..links import measured_links
from ..origin import Origin, now
from ..profile import Profile
from ..series import Series
from .deepep import deepep_series
from .folders import TableFile, newest_table, system_folder
from .kernels import gemm_series, moe_series
from .nccl import nccl_series

__all__ = ["read_tables"]


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
    keyed, cluster = {one.key: one for one in series}, Cluster(1, num_devices)
    links = measured_links(cluster, keyed)
    return Profile.make(
        origins=(Origin(kind="tables", created_at=now(), name=f"{system}: {', '.join(one.name for one in read)}"),),
        cluster=replace(cluster, links=links),
        link_origins=dict.fromkeys(links, 0),
        series=keyed,
    )
