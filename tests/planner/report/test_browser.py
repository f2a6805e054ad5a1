"""Pages in a headless Chromium: no error, nothing asked for outside, nothing wider than a phone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moeplan.planner.certify import recount
from moeplan.planner.compare import compare
from moeplan.planner.demo.text import other_text, record_embedded
from moeplan.planner.report.compare import write_comparison
from moeplan.planner.report.page import PlanPage
from moeplan.planner.report.profile_picture import write_profile_page
from moeplan.planner.report.trace import write_trace_page
from moeplan.profilers.profile import load as load_profile
from moeplan.runtime import load_plan
from moeplan.traces.statistics import describe
from tests.browser import Browser, browsing, chromium
from tests.planner.makers import made, tallied

A4 = 688  # pixels of a sheet between its margins

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium is installed to look at pages with")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture(scope="module")
def pages(make_trace: Any, make_profile: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A page of every kind; of plans those with pictures or tables of their own."""
    trace, profile, folder = make_trace(samples=130, tokens=12), make_profile("2x2"), tmp_path_factory.mktemp("pages")
    steps, _ = tallied(folder / "steps", hidden_size=64, ffn_size=96, dtype_bytes=4)
    states = record_embedded(other_text()[:768], folder / "states", sample_tokens=24, weights=True, embeddings="all")
    for name, source, settings in (
        ("eplb", trace, {"profile": profile, "redundant": "auto"}),
        ("exflow", trace, {}),
        ("flexmoe", steps, {"profile": profile, "slots": 5}),
        ("luffy", states, {"profile": profile, "condense": 0.1, "wire": "fp8"}),
    ):
        path, by = folder / f"{name}.json", settings.get("profile")
        made(source, name, "2x2", to=path, **settings)
        plan = load_plan(path)
        counted = recount(plan, source.path, by, folder=folder, keep=True)
        shown = PlanPage(plan, path, counted, by and load_profile(by))
        shown.write(folder / f"{name}.html")
    shown.write(folder / "card.svg")
    write_comparison(compare([folder / "eplb.json"], trace.path, profile=profile, keep=True), folder / "compare.html")
    write_trace_page(trace, describe(trace, coactivation=True), folder / "trace.html")
    write_profile_page(load_profile(profile), folder / "profile.html")
    return [*folder.glob("*.html"), folder / "card.svg"]


@pytest.mark.parametrize(
    ("width", "scheme", "media"),
    [(375, "light", "screen"), (375, "dark", "screen"), (1280, "light", "screen"), (A4, "light", "print")],
)
def test_no_page_complains_asks_or_overflows(
    browser: Browser, pages: list[Path], width: int, scheme: str, media: str
) -> None:
    assert len(pages) == 8
    for page in pages:
        seen = browser.visit(page, width=width, scheme=scheme, media=media)
        assert (seen["outside"], seen["errors"]) == ([], []), page
        assert page.suffix == ".svg" or seen["width"] <= width, page


def test_a_phone_shows_how_much_of_today_a_plan_takes_without_a_scroll(browser: Browser, pages: list[Path]) -> None:
    shown = "one.offsetParent && one.textContent == '% of today'"
    heads = f"[...document.querySelectorAll('th')].filter(one => {shown})"
    told = list[str]()
    for page in pages:
        browser.visit(page, width=375)
        ends = browser.value(f"{heads}.map(one => one.getBoundingClientRect().right)")
        assert all(0 < end <= 375 for end in ends), page
        told += [page.stem] if ends else []
    assert {*told} == {"eplb", "exflow", "compare"}  # others have tables of their own


def test_a_page_is_dark_where_that_is_preferred(browser: Browser, pages: list[Path]) -> None:
    colours = []
    for scheme in ("light", "dark"):
        browser.visit(pages[0], width=375, scheme=scheme)
        colours.append(browser.value("getComputedStyle(document.body).backgroundColor"))
    assert colours == ["rgb(255, 255, 255)", "rgb(20, 23, 30)"]


@pytest.mark.parametrize("box", ["<div>", "<div style='overflow-x:auto'>", "<details><div style='overflow:hidden'>"])
def test_a_browser_tells_of_a_table_that_is_cut_on_paper_wherever_it_is(
    browser: Browser, tmp_path: Path, box: str
) -> None:
    (tmp_path / "p.html").write_text(
        f"<!doctype html><body>{box}<table><tr><td style='min-width:{A4 + 40}px'>1</table>"
    )
    assert browser.visit(tmp_path / "p.html", width=A4, media="print")["width"] >= A4 + 40


def test_a_browser_tells_of_what_is_wrong(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "p.html").write_text(
        "<img src='http://127.0.0.1:9/x.png'><script>throw 1</script><div style='width:900px'>x</div>"
    )
    seen = browser.visit(tmp_path / "p.html", width=375)
    assert seen["outside"] == ["http://127.0.0.1:9/x.png"]
    assert seen["errors"]
    assert seen["width"] >= 900
