"""The page of a trace: what its figures hold, and that it stays small."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.planner.document import Section
from moeplan.planner.report import trace as page
from moeplan.planner.report.trace import write_trace_page
from moeplan.traces.importers import import_trace
from moeplan.traces.reader import open_trace
from moeplan.traces.statistics import describe, describe_counts
from tests.planner.makers import counted, figure_in

NAMES = [str(layer) for layer in range(64)]


def sections_of(statistics: Any) -> dict[str, Section]:
    return {section.title: section for section in page._sections(statistics, NAMES[: len(statistics.loads)])}


def test_figures_hold_the_shares_of_plain_loops(make_trace: Any) -> None:
    statistics: Any = describe(make_trace(layers=3, experts=8, top_k=2, samples=40), coactivation=True)
    sections = sections_of(statistics)
    assert list(sections) == [
        "Loads", "Locality of samples", "What a layer tells of the next", "Transitions", "Co-activation",
    ]  # fmt: skip
    shares = statistics.loads / statistics.loads.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(np.asarray(figure_in(sections["Loads"]).data[0].z), shares, rtol=1e-5)
    for title in ("Transitions", "Co-activation"):
        table = getattr(statistics.tokens.counts, title.lower().replace("-", ""))
        figure = figure_in(sections[title])
        for drawn, counts in zip(figure.data, table, strict=True):
            shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
            np.testing.assert_allclose(np.asarray(drawn.z), shares, rtol=1e-5)
    recorded, shuffled = figure_in(sections["What a layer tells of the next"]).data
    assert list(recorded.y) == statistics.tokens.information.bits.tolist()
    assert list(shuffled.y) == statistics.tokens.information.shuffled.tolist()
    assert list(figure_in(sections["Locality of samples"]).data[0].y) == statistics.locality.index.tolist()


def test_the_slider_shows_one_layer_at_a_time(make_trace: Any) -> None:
    figure = figure_in(sections_of(describe(make_trace(layers=4)))["Transitions"])
    steps = figure.layout.sliders[0].steps
    assert [step.label for step in steps] == ["0 to 1", "1 to 2", "2 to 3"]
    assert [drawn.visible for drawn in figure.data] == [True, False, False]
    for layer, step in enumerate(steps):
        assert step.args[0]["visible"] == [other == layer for other in range(3)]


def test_layer_axes_have_whole_ticks_that_name_the_hidden_layer_where_it_differs(make_trace: Any) -> None:
    statistics: Any = describe(make_trace(layers=3), coactivation=True)
    names = page._layer_names((0, 3, 5))
    sections = {section.title: figure_in(section).layout for section in page._sections(statistics, names)}
    for axis in (sections["Loads"].yaxis, sections["Locality of samples"].xaxis):
        assert axis.title.text == "layer (hidden layer)"
        assert (axis.tickvals, axis.ticktext) == ((0, 1, 2), ("0", "1 (3)", "2 (5)"))
    assert [step.label for step in sections["Transitions"].sliders[0].steps] == ["0 to 1 (3)", "1 (3) to 2 (5)"]
    many = page._layer_axis(page._layer_names(range(60)))
    assert (many["title"], many["tickvals"]) == ("layer", [*range(0, 60, 3)])


def test_many_experts_are_drawn_in_groups_that_say_so(make_trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    statistics: Any = describe(make_trace(layers=3, experts=8, samples=60))
    monkeypatch.setattr(page, "MAX_CELLS", 2 * 3 * 3)
    section = sections_of(statistics)["Transitions"]
    assert "groups of 3 experts" in section.body[0].lines[0]  # type: ignore[union-attr]
    first = statistics.tokens.counts.transitions[0]
    z = np.asarray(figure_in(section).data[0].z)
    assert z.shape == (3, 3)
    assert z[0, 2] == pytest.approx(first[:3, 6:].sum() / first[:3].sum(), rel=1e-5)
    assert z[2, 1] == pytest.approx(first[6:, 3:6].sum() / first[6:].sum(), rel=1e-5)


def test_counts_have_loads_and_locality_only(make_trace: Any, tmp_path: Path) -> None:
    counts = counted(make_trace(), tmp_path / "counts")
    assert list(sections_of(describe_counts(counts))) == ["Loads", "Locality of samples"]
    write_trace_page(counts, describe_counts(counts), tmp_path / "p.html")
    assert "Routing of random" in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize("shape", [{"layers": 1}, {"top_k": 1}, {"unrouted": 1.0}, {"columns": ()}])
def test_a_trace_with_little_in_it_is_drawn_too(make_trace: Any, tmp_path: Path, shape: dict[str, Any]) -> None:
    trace = make_trace(**shape)
    write_trace_page(trace, describe(trace, coactivation=True), tmp_path / "p.html")
    assert (tmp_path / "p.html").stat().st_size > 10**6


def test_the_page_of_real_routing_stays_below_8_megabytes(gpt_oss: Path, tmp_path: Path) -> None:
    import_trace(gpt_oss, tmp_path / "trace")
    trace = open_trace(tmp_path / "trace")
    statistics: Any = describe(trace, coactivation=True)
    write_trace_page(trace, statistics, tmp_path / "p.html")
    assert (tmp_path / "p.html").stat().st_size < 8e6
    assert statistics.tokens.information.excess.min() > 1  # gpt-oss has affinity
    assert statistics.locality.index.min() > 0.05  # and its samples have experts of their own
