"""Kernels on one device: GEMMs and fused expert layers by size, `latency` in milliseconds.

A table may time several kernels in one dtype; the one with the most rows is read, and rows of equal size are one, at
their median.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..cases.works import work_of
from ..fits.fitting import fit_arrays
from ..series import Series
from .rows import Rows

MOE_COLUMNS = {
    "tokens": "num_tokens",
    "hidden": "hidden_size",
    "ffn": "inter_size",
    "top_k": "topk",
    "experts": "num_experts",
    "tp": "moe_tp_size",
    "ep": "moe_ep_size",
}
Ints = NDArray[np.int64]


def gemm_series(path: Path) -> list[Series]:
    """A series `gemm` over (m, n, k) a dtype."""
    names, columns = ("gemm_dtype", "kernel_source"), ("m", "n", "k", "latency")
    rows = Rows.read(path, names=names, sizes=columns[:3], times=columns[3:], s_per_unit=1e-3)
    found = []
    for dtype, some in rows.above_zero(columns).by_dtype("gemm_dtype").items():
        kernel = _commonest(some)
        size = {axis: kernel[axis] for axis in ("m", "n", "k")}
        found.append(_series("gemm", dtype, size, kernel))
    return found


def moe_series(path: Path) -> list[Series]:
    """Two series a dtype: `moe` over what the table varies, and `expert_ffn`, what a device's experts take of it.

    Notes
    -----
    `moe` is the fused layer of one of tp x ep devices, its tokens those routed in all. `skew_percent` is 0 where
    experts are equally loaded and 100 a where their loads follow a power law of exponent a.

    `expert_ffn` has the sizes of the case: of the evenly loaded rows, the token-expert pairs, experts and FFN slice of
    one device. The kernel also sorts and adds up all copies, of which a device with few of the experts keeps few:
    only rows with at least a pair a token (ep <= top_k) are read.
    """
    names, columns = ("moe_dtype", "kernel_source", "distribution"), tuple(MOE_COLUMNS.values())
    rows = Rows.read(path, names=names, sizes=columns, times=("latency",), s_per_unit=1e-3)
    rows = rows.above_zero((*columns, "latency"))
    skews = np.array([_skew_percent(name) for name in rows["distribution"].tolist()])
    rows = rows.having("skew_percent", skews).where(skews >= 0)
    found = []
    for dtype, some in rows.by_dtype("moe_dtype").items():
        kernel = _commonest(some)
        size = {axis: kernel[column] for axis, column in MOE_COLUMNS.items()} | {"skew_percent": kernel["skew_percent"]}
        found.append(_series("moe", dtype, size, kernel))
        even = kernel.where((size["skew_percent"] == 0) & (size["ep"] <= size["top_k"]))
        share = _share({axis: even[column] for axis, column in MOE_COLUMNS.items()})
        found.append(_series("expert_ffn", dtype, share, even))
    return found


def _share(size: Mapping[str, Ints]) -> dict[str, Ints]:
    """Share of an evenly loaded layer that one device computes."""
    return {
        "tokens": np.maximum(size["tokens"] * size["top_k"] // size["ep"], 1),
        "experts": np.maximum(size["experts"] // size["ep"], 1),
        "hidden": size["hidden"],
        "ffn": np.maximum(size["ffn"] // size["tp"], 1),
        "grouped": np.ones_like(size["tokens"]),
    }


def _series(case: str, dtype: str, size: Mapping[str, Ints], rows: Rows) -> Series:
    fit = fit_arrays(size, work_of(case, size, 1), rows["latency"])
    return Series(case=case, dtype=dtype, ranks=1, unit="macs", fit=fit)


def _commonest(rows: Rows) -> Rows:
    kernels = rows.by("kernel_source")
    return max(kernels.values(), key=lambda some: len(some["latency"]), default=rows)


def _skew_percent(distribution: str) -> int:
    """-1 for a distribution that is not known."""
    if distribution in ("balanced", "uniform"):
        return 0
    found = re.fullmatch(r"power_law_(\d{1,2}(?:\.\d{1,4})?)", distribution)
    return round(100 * float(found[1])) if found else -1
