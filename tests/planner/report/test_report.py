"""Page and card of a plan: the evaluator's figures, what is left out, and that files are whole, small and offline."""

import errno
import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from moeplan.errors import StorageError
from moeplan.planner.certify import recount
from moeplan.planner.document import write_page
from moeplan.planner.evaluate.sums import device_ratios
from moeplan.planner.figures import contender_of
from moeplan.planner.report.answer import answer, headline
from moeplan.planner.report.command import made_by
from moeplan.planner.report.page import PlanPage
from moeplan.planner.report.pictures import histogram, load_section, strips, time_section, traffic_section
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.profile import load as load_profile
from moeplan.runtime.plan import Contender, Metric, Part
from tests.builders import known
from tests.planner.makers import edited, pictures_in, planned, tallied

TODAY = "contiguous/standard"
KINDS: dict[str, dict[str, Any]] = {
    "eplb": {"redundant": 4},
    "exflow": {},
    "netmoe": {},
    "pipemoe": {"max_degree": 4},
}


@pytest.fixture(scope="module")
def trace(make_trace: Any) -> Any:
    return make_trace(samples=130, tokens=12)


@pytest.fixture(scope="module")
def profile(make_profile: Any) -> Path:
    path: Path = make_profile("2x2")
    return path


@pytest.fixture(scope="module", params=KINDS)
def shown(request: Any, trace: Any, profile: Path, tmp_path_factory: pytest.TempPathFactory) -> PlanPage:
    """The page of a plan of every kind, with its trace and profile."""
    path = tmp_path_factory.mktemp("report") / "plan.json"
    plan = planned(trace, request.param, "2x2", profile=profile, to=path, **KINDS[request.param])
    counted = recount(plan, trace.path, profile, folder=path.parent, keep=True)
    return PlanPage(plan, path, counted, load_profile(profile))


def values(shown: PlanPage, label: str) -> dict[str, float]:
    part, *_ = known(shown.shown)
    return {name: metric.value for name, metric in contender_of(part, label).metrics.items()}


def test_loads_are_those_that_balance_and_its_95th_percentile_are_of(shown: PlanPage) -> None:
    part, today, ours = known(shown.shown)
    for label in (today, ours):
        ratio_BL = device_ratios(shown.tallies[label])
        assert ratio_BL.mean() == pytest.approx(values(shown, label)["balance"])
        strip: Any = next(strips(part, shown.tallies, label, []))
        dots, ticks = strip.lines[1:]
        assert np.mean(ticks.x) == pytest.approx(values(shown, label)["balance"])
        assert np.mean(dots.x) == pytest.approx(1)
        assert max(dots.x) <= max(ticks.x) + 1e-9
    picture: Any = histogram(part, shown.tallies, today, [ours])
    assert all(sum(line.y) == pytest.approx(100) for line in picture.lines)
    (section,) = [one for one in shown.sections() if one.title == "Load of devices"]
    table: Any = section.body[-1]
    cells = {column.header: dict(zip(table.columns[0].cells, column.cells, strict=True)) for column in table.columns}
    assert cells["p95"]["today"] == f"{values(shown, today)['balance_p95']:.2f}"
    assert cells["mean"]["today"] == f"{values(shown, today)['balance']:.2f}"
    assert cells["p99"]["ideal"] == "1.00"


def test_bars_add_up_to_the_step_and_say_the_percent_of_the_ideal_that_tables_say(shown: PlanPage) -> None:
    part, today, _ = known(shown.shown)
    whole = shown.plan.decisions.pipeline is None
    (bars,) = pictures_in(known(time_section(part, today, whole=whole)))
    unit = {"us": 1e6, "ms": 1e3, "s": 1.0}[bars.x.title.split()[0]]
    for bar, one in zip(bars.bars, part.contenders, strict=False):
        step = one.metrics["step_s"].value
        assert sum(span.length for span in bar.spans) == pytest.approx(step * unit, rel=1e-9)
        ends = [(span.start, span.start + span.length) for span in bar.spans]
        assert all(before[1] == pytest.approx(after[0]) for before, after in itertools.pairwise(ends))
        share = 100 * values(shown, today)["ideal_step_s"] / step
        assert bar.end.endswith(f", {share:.0f} % of ideal") == whole


def test_bytes_between_devices_add_up_to_the_metrics(shown: PlanPage) -> None:
    part, today, ours = known(shown.shown)
    for label in (today, ours):
        section = known(traffic_section(part, shown.tallies, [label], today, shown.plan.cluster))
        (heat,) = pictures_in(section)
        far = heat.table[:2, 2:].sum() + heat.table[2:, :2].sum()
        assert far * 1e6 == pytest.approx(values(shown, label)["inter_bytes"])
        assert heat.table.sum() * 1e6 == pytest.approx(sum(values(shown, label)[f"int{x}_bytes"] for x in ("er", "ra")))
        assert not heat.table.diagonal().any()


def test_the_page_is_small_offline_and_says_what_solve_says(shown: PlanPage, tmp_path: Path) -> None:
    shown.write(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert len(text) < 2e6
    assert not re.search(r"https?://|<script|@import|url\(", text)
    plan = shown.plan
    for said in (answer(plan).replace("'", "&#x27;"), plan.plan_sha256, plan.inputs.trace.sha256, "certified "):  # type: ignore[union-attr]
        assert said in text
    assert f"{known(plan.evaluation).fit.num_tokens:,} tokens of " in text
    balance = values(shown, known(shown.shown)[2])["balance"]
    for figure in (balance, 1 / balance, balance - 1):
        assert f"<td>{figure:.3f}</td>" in text
    fit = known(known(shown.profile).series[plan.options["seconds"]["sources"]["experts"]].fit)
    assert f"median {100 * fit.held_out[fit.model.kind].median_error:.1f} %" in text


def test_without_its_trace_the_page_says_what_it_lacks_and_how_to_get_it_back(shown: PlanPage, tmp_path: Path) -> None:
    alone = PlanPage(shown.plan, shown.path, recount(shown.plan, folder=shown.path.parent, keep=True), None)
    (line,) = alone.left_out
    assert "is not here as it was; give it with --trace" in line
    assert "is not here as it was; give it with --profile" in line
    alone.write(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert line in text
    assert "Load of devices" not in text
    assert "NOT certified" in text
    alone.write(tmp_path / "card.svg")
    assert shown.left_out == []


def test_the_card_is_an_svg_of_1200_by_630_with_the_answer(shown: PlanPage, tmp_path: Path) -> None:
    shown.write(tmp_path / "card.svg")
    root = ElementTree.parse(tmp_path / "card.svg").getroot()
    assert (root.attrib["width"], root.attrib["height"]) == ("1200", "630")
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert headline(shown.plan) in words
    assert " ".join(words).count("balance ") >= 1  # type: ignore[arg-type]
    assert "http" not in (tmp_path / "card.svg").read_text().replace("http://www.w3.org/2000/svg", "")
    for nested in root.iter("{http://www.w3.org/2000/svg}svg"):
        assert float(nested.attrib.get("y", 0)) + float(nested.attrib["height"]) <= 630


def test_hostile_names_are_escaped(trace: Any, tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script>"
    plan = edited(planned(trace, "eplb", "2x2"), "model.name", hostile)
    plan = edited(plan, "inputs.trace.path", f"{hostile}/'\"&")
    shown = PlanPage(plan, tmp_path / f"{hostile[2:8]}.json", recount(plan, keep=True), None)
    for name in ("report.html", "card.svg"):
        shown.write(tmp_path / name)
        assert hostile not in (tmp_path / name).read_text()
        assert "&lt;/script&gt;" in (tmp_path / name).read_text()


@pytest.mark.parametrize("name", ["report.html", "card.svg"])
def test_a_full_disk_leaves_no_half_file(
    shown: PlanPage, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def full(path: Path, text: str, **options: Any) -> int:
        if path.parent != tmp_path:
            return write(path, text, **options)
        write(path, text[:99])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StorageError, match="No space left"):
        shown.write(tmp_path / name)
    assert [*tmp_path.iterdir()] == []


def test_a_mixture_has_no_pictures_of_one_of_its_traces(trace: Any, make_trace: Any, tmp_path: Path) -> None:
    other = make_trace(samples=90, tokens=12, seed=5)
    mixture = ((str(trace.path), 1.0), (str(other.path), 1.0))
    plan = planned(trace, "eplb", "2x2", mixture=mixture)
    shown = PlanPage(plan, tmp_path / "plan.json", recount(plan, trace.path, keep=True), None)
    assert "means over several traces" in shown.left_out[0]
    assert "Load of devices" not in {section.title for section in shown.sections()}
    assert f"--trace {trace.path}:0.5 --trace {other.path}:0.5" in made_by(plan, None)


def test_counts_have_loads_and_no_pairs_of_devices(tmp_path: Path) -> None:
    trace, _ = tallied(tmp_path / "t")
    plan = planned(trace, "eplb", "2x2", redundant="auto")
    shown = PlanPage(plan, tmp_path / "plan.json", recount(plan, trace.path, keep=True), None)
    titles = {section.title for section in shown.sections()}
    assert {"Load of devices", "The price of replicas"} <= titles
    assert not {title for title in titles if "between devices" in title}


def test_a_plan_that_was_not_judged_has_no_pictures(trace: Any, tmp_path: Path) -> None:
    plan = planned(trace, "eplb", "2x2")
    bare = edited(edited(plan, "verdict", None), "evaluation", None)
    shown = PlanPage(bare, tmp_path / "plan.json", recount(bare, trace.path, keep=True), None)
    for name in ("report.html", "card.svg"):
        shown.write(tmp_path / name)
    text = (tmp_path / "report.html").read_text()
    assert "<svg" not in text
    assert "NOT certified" in text
    assert "the plan has no evaluation to recompute; re-run moeplan solve" in text
    assert bare.plan_sha256 in text


def test_many_layers_of_many_devices_stay_below_2_mb(tmp_path: Path) -> None:
    rng, devices = np.random.default_rng(0), 512
    loads = rng.integers(1, 99, (40, 61, devices))
    tally: Any = SimpleNamespace(
        loads=loads, slots=np.ones(devices), between_per_step=rng.random((devices, devices)) * (1 - np.eye(devices))
    )
    metrics = {name: Metric(value=1.0) for name in ("balance", "inter_bytes", "intra_bytes")}
    rows = tuple(Contender(name=name, dispatch_model="standard", metrics=metrics) for name in ("plan", "contiguous"))
    counts: dict[str, Any] = {
        "num_samples": 1,
        "num_tokens": 1,
        "num_steps": 40,
        "dropped_samples": 0,
        "tokens_per_step": 1.0,
    }
    part, other = Part(contenders=rows, **counts), SimpleNamespace(**vars(tally) | {"loads": loads[::-1] + 1})
    other.between_per_step = tally.between_per_step.T
    tallies: Any = {"plan/standard": tally, TODAY: other}
    sections = [
        load_section(part, tallies, TODAY, ["plan/standard"]),
        known(traffic_section(part, tallies, [TODAY, "plan/standard"], TODAY, Cluster(64, 8))),
    ]
    write_page(tmp_path / "p.html", "large", "", sections)
    assert (tmp_path / "p.html").stat().st_size < 2e6
