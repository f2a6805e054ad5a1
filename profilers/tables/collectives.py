"""Exchanges between devices: collectives of nccl-tests, and the dispatch and combine of DeepEP inside a node.

nccl-tests counts elements of `nccl_dtype` in `message_size`, and milliseconds. DeepEP's times are microseconds; its
rows of several nodes are left out: those of different systems are the same, so one label is wrong.
"""

from pathlib import Path

import numpy as np

from ...errors import InputError
from ..cases import CASES
from ..cases.works import work_of
from ..fits.fitting import fit_arrays, fit_series
from ..measurement import Measurement
from ..series import ELEMENT_BYTES, Series
from .rows import Rows

CASE_OF_OP = {
    "alltoall": "all_to_all",
    "all_gather": "all_gather",
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
}
MOVES = ("all_to_all", "all_gather")  # bytes are bytes, whatever their dtype
MAX_GPUS = 4096
COLUMNS = {"tokens": "num_token", "hidden": "hidden_size", "top_k": "num_topk", "experts": "num_experts"}
PARTS = {"dispatch": "fp8", "combine": "bf16"}  # what is sent, by the tables' own bandwidth


def nccl_series(path: Path) -> list[Series]:
    """A series a collective, dtype and number of GPUs.

    Notes
    -----
    Sizes become bytes of the buffer as nccl-tests counts it. Collectives that only move bytes are one series "uint8",
    to which the rows of all dtypes of equal bytes are samples; those that add numbers are one a dtype. Rows of other
    operations, and of dtypes whose width is not known, are left out.
    """
    sizes = ("num_gpus", "message_size")
    rows = Rows.read(path, names=("nccl_dtype", "op_name"), sizes=sizes, times=("latency",), s_per_unit=1e-3)
    fewest, most = int(rows["num_gpus"].min()), int(rows["num_gpus"].max())
    if not 1 <= fewest <= most <= MAX_GPUS:
        raise InputError(f"{path}: collectives of {fewest:,} to {most:,} GPUs; expected 1 to {MAX_GPUS:,}")
    series: list[Series] = []
    for op, case in CASE_OF_OP.items():
        for ranks, some in rows.where(rows["op_name"] == op).by("num_gpus").items():
            for dtype, samples in _samples(case, some).items():
                series.append(_series(case, dtype, ranks, samples))
    return [one for one in series if one.measurements]


def deepep_series(path: Path, *, low_latency: bool, ranks: int) -> list[Series]:
    """Two series, `deepep_dispatch` and `deepep_combine` (`deepep_ll_...` in low-latency mode), over `ranks` devices.

    Notes
    -----
    Sizes are tokens of a rank, hidden, top_k and experts, and in normal mode `sms`, the multiprocessors given to it;
    seconds there are those of notifying and of sending together.
    """
    named = ("avg_t_us",) if low_latency else ("transmit_us", "notify_us")
    times = {part: [f"{part}_{name}" for name in named] for part in PARTS}
    counts = {part: {} if low_latency else {"sms": f"{part}_sms"} for part in PARTS}
    sizes = {*COLUMNS.values(), "node_num", *(name for part in counts.values() for name in part.values())}
    every_time = [name for part in times.values() for name in part]
    rows = Rows.read(path, sizes=sorted(sizes), times=every_time, s_per_unit=1e-6)
    rows = rows.above_zero((*COLUMNS.values(), *(names[0] for names in times.values())))
    rows = rows.where(rows["node_num"] == 1)
    series = []
    for part, dtype in PARTS.items():
        case = f"deepep_ll_{part}" if low_latency else f"deepep_{part}"
        size = {axis: rows[column] for axis, column in (COLUMNS | counts[part]).items()}
        seconds = np.sum([rows[name] for name in times[part]], axis=0)
        fit = fit_arrays(size, work_of(case, size, ranks), seconds)
        series.append(Series(case=case, dtype=dtype, ranks=ranks, link="intra", unit="bytes", fit=fit))
    return series


def _samples(case: str, rows: Rows) -> dict[str, dict[int, list[float]]]:
    """Dtype to bytes to seconds."""
    samples_of_dtype: dict[str, dict[int, list[float]]] = {}
    for dtype, some in rows.above_zero(("latency",)).by_dtype("nccl_dtype").items():
        if width := ELEMENT_BYTES.get(dtype):
            sizes = samples_of_dtype.setdefault("uint8" if case in MOVES else dtype, {})
            for elements, seconds in zip(some["message_size"].tolist(), some["latency"].tolist(), strict=True):
                sizes.setdefault(elements * width, []).append(seconds)
    return samples_of_dtype


def _series(case: str, dtype: str, ranks: int, samples: dict[int, list[float]]) -> Series:
    sizes = [{"bytes": num_bytes} for num_bytes in sorted(samples) if num_bytes >= ranks > 1]
    measurements = [Measurement.of(size, int(CASES[case].work(size, ranks)), samples[size["bytes"]]) for size in sizes]
    return Series(
        case=case,
        dtype=dtype,
        ranks=ranks,
        link="intra",
        unit="bytes",
        measurements=tuple(measurements),
        fit=fit_series(CASES[case], ranks, measurements),
    )
