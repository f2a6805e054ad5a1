"""DeepEP's dispatch and combine inside a node: times in microseconds.

The tables' rows of several nodes are left out: those of different systems are the same, so one label is wrong.
"""

from pathlib import Path

import numpy as np

from ..cases.works import work_of
from ..fits.fitting import fit_arrays
from ..series import Series
from .rows import Rows

__all__ = ["deepep_series"]

COLUMNS = {"tokens": "num_token", "hidden": "hidden_size", "top_k": "num_topk", "experts": "num_experts"}
PARTS = {"dispatch": "fp8", "combine": "bf16"}  # what is sent, by the tables' own bandwidth


def deepep_series(path: Path, *, low_latency: bool, ranks: int) -> list[Series]:
    """Two series, `deepep_dispatch` and `deepep_combine` (`deepep_ll_...` in low-latency mode), over `ranks` devices.

    Notes
    -----
    Sizes are tokens of a rank, hidden, top_k and experts, and in normal mode `sms`, the multiprocessors given to it;
    seconds there are those of notifying and of sending together.
    """
    times = {part: [f"{part}_avg_t_us"] if low_latency else _normal(part) for part in PARTS}
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


def _normal(part: str) -> list[str]:
    return [f"{part}_transmit_us", f"{part}_notify_us"]
