"""The real routing of gpt-oss-20b, from the file to a certified plan, against a recount from the file."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.planner.certify import certify
from moeplan.planner.report.trace import write_trace_page
from moeplan.traces.count_form import open_any
from moeplan.traces.examples import write_example
from moeplan.traces.importers import import_trace
from moeplan.traces.reader import open_trace
from moeplan.traces.statistics import describe
from tests.planner.makers import judged, planned


@pytest.fixture(scope="module")
def trace(gpt_oss: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt-oss") / "trace"
    import_trace(gpt_oss, folder, hidden_size=2880, dtype_bytes=2)
    return folder


@pytest.fixture(scope="module")
def plan(trace: Path) -> Any:
    return planned(open_any(trace), "exflow", "1x8", time_limit_s=5.0)


def unseen_tokens(sample_T: NDArray[Any], seed: int) -> NDArray[np.bool_]:
    """Tokens of samples whose hash lies in the upper half."""
    digests = {sample: hashlib.sha256(f"{seed}:{sample}".encode()).hexdigest() for sample in set(sample_T.tolist())}
    return np.array([int(digests[sample][:16], 16) >= 2**63 for sample in sample_T.tolist()])


def test_held_out_hops_are_kept_and_balance_stands_beside(plan: Any, trace: Path) -> None:
    ours, contiguous = (judged(plan)[f"{name}/coherent"] for name in ("plan", "contiguous"))
    assert ours["hops_kept"] >= 0.56
    assert contiguous["hops_kept"] < 0.2
    assert 1 < ours["balance"] < 3
    assert plan.verdict.value == "benefit"
    assert "trace hash" in certify(plan, trace).checks


def test_a_recount_from_the_file_gives_the_same_share_to_the_last_token(plan: Any, gpt_oss: Path) -> None:
    with np.load(gpt_oss) as arrays:
        unseen_T = unseen_tokens(arrays["seq_id"], seed=0)
        first_TL = arrays["expert_ids"][unseen_T, :, 0]
    # The slot of each expert, `[L, E]`, read off the plan's lists.
    slot_LE = np.argsort(plan.decisions.placement.physical_to_logical, axis=1)
    device_TL = slot_LE[np.arange(24), first_TL] // plan.decisions.placement.slots_per_device
    kept = int((device_TL[:, 1:] == device_TL[:, :-1]).sum())
    assert judged(plan)["plan/coherent"]["hops_kept"] == kept / (23 * len(device_TL))
    assert plan.evaluation.held_out.num_tokens == len(device_TL)


def test_moving_samples_saves_something_and_says_so(trace: Path) -> None:
    figures = judged(planned(open_any(trace), "netmoe", "2x4"))
    base, plan, oracle = (
        figures[label]["inter_bytes"] for label in ("contiguous/standard", "plan/migrating", "oracle/migrating")
    )
    assert 1 - plan / base == pytest.approx(0.064, abs=0.01)
    assert 1 - oracle / base == pytest.approx(0.071, abs=0.01)


def test_the_page_of_its_trace_stays_below_8_megabytes(trace: Path, tmp_path: Path) -> None:
    source = open_trace(trace)
    statistics: Any = describe(source, coactivation=True)
    write_trace_page(source, statistics, tmp_path / "p.html")
    assert (tmp_path / "p.html").stat().st_size < 8e6
    assert statistics.tokens.information.excess.min() > 1  # gpt-oss has affinity
    assert statistics.locality.index.min() > 0.05  # and its samples have experts of their own


def test_figures_of_the_shipped_example_lie_within_the_intervals_of_the_whole(trace: Path, tmp_path: Path) -> None:
    write_example("gpt-oss-20b", tmp_path / "example")
    whole, part = (
        planned(open_any(path), "contiguous", "2x8", fit_fraction=1.0).evaluation.fit.contenders[0]
        for path in (trace, tmp_path / "example")
    )
    assert whole.label == part.label == "plan/standard"
    for name in ("balance", "device_copies", "hops_kept"):
        interval = whole.metrics[name]
        assert interval.low <= part.metrics[name].value <= interval.high, name
        assert part.metrics[name].high - part.metrics[name].low < 3 * (interval.high - interval.low), name
