"""Pages: whole, offline, the same each time."""

import re
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

from moeplan.errors import StorageError
from moeplan.planner.document import Section, drawn, write_page


def page(path: Path, *sections: Section, title: str = "A <title>", text: str = "1 < 2") -> str:
    write_page(path, title, text, sections)
    return path.read_text(encoding="utf-8")


@pytest.fixture
def section() -> Section:
    return drawn("Head & tail", "a < b", go.Figure(go.Scatter(x=[1, 2], y=[3, 4])))


def test_a_page_holds_the_library_once_and_refers_to_nothing_outside(tmp_path: Path, section: Section) -> None:
    text = page(tmp_path / "p.html", section, section)
    library = get_plotlyjs()
    assert text.count(library) == 1
    own = text.replace(library, "")
    assert not re.search(r"""(src|href)\s*=|@import|url\(""", own)
    assert not re.search(r"https?://(?!www\.w3\.org)", re.sub(r'"plotlyServerURL":"[^"]*"', "", own))
    assert "default-src 'none'" in own
    assert own.count("Plotly.newPlot(") == 2
    assert 'id="figure-0-1"' in own
    assert 'id="figure-1-1"' in own


def test_what_is_said_is_escaped(tmp_path: Path, section: Section) -> None:
    text = page(tmp_path / "p.html", section, title="</script><b>")
    assert "<title>&lt;/script&gt;&lt;b&gt;</title>" in text
    assert "<p>1 &lt; 2</p>" in text
    assert "<h2>Head &amp; tail</h2><p>a &lt; b</p>" in text


def test_names_in_a_figure_cannot_end_its_script(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script>"
    figure = go.Figure(go.Scatter(x=[1], y=[1], name=hostile))
    assert hostile not in page(tmp_path / "p.html", drawn("x", "y", figure))


def test_equal_contents_give_equal_bytes(tmp_path: Path, section: Section) -> None:
    assert page(tmp_path / "a.html", section) == page(tmp_path / "b.html", section)


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path, section: Section) -> None:
    (tmp_path / "p.html").mkdir()
    with pytest.raises(StorageError, match=r"p\.html"):
        page(tmp_path / "p.html", section)
    assert [path.name for path in tmp_path.iterdir()] == ["p.html"]


def test_a_section_that_fails_leaves_the_old_page(tmp_path: Path, section: Section) -> None:
    old = page(tmp_path / "p.html", section)

    def failing() -> Any:
        yield section
        raise StorageError("no more")

    with pytest.raises(StorageError):
        write_page(tmp_path / "p.html", "x", "y", failing())
    assert (tmp_path / "p.html").read_text(encoding="utf-8") == old
