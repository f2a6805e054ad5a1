"""The page of bytes between devices."""

from pathlib import Path
from typing import Any

from moeplan.planner.compare import compare
from moeplan.planner.report.compare import write_matrices
from moeplan.planner.request import Request
from moeplan.planner.solve import make
from moeplan.profilers.cluster import Cluster


def test_the_page_has_a_matrix_a_contender_with_its_bytes(make_trace: Any, tmp_path: Path) -> None:
    trace, path = make_trace(samples=64), tmp_path / "plan.json"
    make(Request.of(strategy="eplb", trace=str(trace.path), cluster=Cluster.parse("2x2"), redundant=4)).save(path)
    found = compare([path], trace.path, between=True)
    write_matrices(found, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<h2>") == len(found.part.contenders) == 3
    moved = found.between[f"{path}/standard"].sum() * found.copy_bytes / 1e6
    assert f"{moved:.4g} MB a step" in page
    assert "between nodes" in page
