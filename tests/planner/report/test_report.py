"""Page and card of a plan: the evaluator's figures, what is left out, and that files are whole, small and offline."""

import errno
import itertools
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from moeplan.errors import StorageError
from moeplan.planner.certify import recount
from moeplan.planner.document import write_page
from moeplan.planner.evaluate.price import PASSES, SOURCES, UNCUT
from moeplan.planner.evaluate.sums import device_ratios
from moeplan.planner.figures import contender_of
from moeplan.planner.picture import GREY
from moeplan.planner.report import card as card_module
from moeplan.planner.report.answer import answer, headline
from moeplan.planner.report.command import made_by
from moeplan.planner.report.next_step import per_engine
from moeplan.planner.report.page import PlanPage
from moeplan.planner.report.pictures import MOST_BARS, PARTS, histogram, load_section, strips, time_section
from moeplan.planner.report.traffic import traffic_section
from moeplan.planner.strategies.registry import strategy
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.profile import load as load_profile
from moeplan.runtime.plan import Contender, Metric, Part
from moeplan.traces.counts import count
from tests.builders import known
from tests.planner.makers import edited, pictures_in, planned, tallied

TODAY = "contiguous/standard"
SVG = "{http://www.w3.org/2000/svg}"
KINDS: dict[str, dict[str, Any]] = {
    "eplb": {"redundant": 4},
    "exflow": {},
    "netmoe": {},
    "pipemoe": {"max_degree": 4},
    "luffy": {"links": ("intra=100:2", "inter=10:5")},
    "auto": {},
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
    for bar, one in zip(bars.bars, part.contenders[:MOST_BARS], strict=False):
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
    assert f"{known(plan.evaluation).fit.num_tokens:,} tokens, " in text
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
    ElementTree.parse(tmp_path / "card.svg")


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


@pytest.mark.parametrize("link", ["inter=10:5:2", "inter=10:5"])
def test_the_command_of_a_plan_says_how_many_devices_share_a_link(trace: Any, link: str) -> None:
    command = made_by(planned(trace, "contiguous", "2x2", links=("intra=100:2", link)), None)
    assert re.findall(r"--link (\S+)", command) == ["intra=100:2", link]


def test_counts_have_loads_and_no_pairs_of_devices(tmp_path: Path) -> None:
    trace, _ = tallied(tmp_path / "t")
    plan = planned(trace, "eplb", "2x2", redundant="auto")
    shown = PlanPage(plan, tmp_path / "plan.json", recount(plan, trace.path, keep=True), None)
    titles = {section.title for section in shown.sections()}
    assert {"Load of devices", "The price of replicas"} <= titles
    assert not {title for title in titles if "between devices" in title}


def test_replicas_pay_once_they_saved_the_time_of_sending_them(trace: Any, profile: Path, tmp_path: Path) -> None:
    plan = planned(trace, "eplb", "2x2", profile=profile, redundant="auto", links=("intra=100:2", "inter=10:5"))
    fewest, *more = plan.options["placement"]["redundancy"]["candidates"]
    *_, drawn = pictures_in(next(strategy("eplb").pictures(plan, tmp_path, None)))
    expected = {
        one["redundant"]: plan.evaluation.fit.tokens_per_step
        * ((one["memory_bytes"] - fewest["memory_bytes"]) / 10e9)
        / (fewest["seconds"] - one["seconds"])
        for one in more
        if one["seconds"] < fewest["seconds"]
    }
    assert expected
    assert "tokens after which replicas pay" in drawn.y.title
    assert dict(zip(drawn.lines[0].x, drawn.lines[0].y, strict=True)) == pytest.approx(expected)


def test_the_price_of_copies_is_drawn_with_the_plan_and_says_when_it_pays(trace: Any, tmp_path: Path) -> None:
    plan = planned(trace, "exflow", "2x2")
    (section, *_) = strategy("exflow").pictures(plan, tmp_path, None)
    (drawn,) = pictures_in(section)
    part = plan.evaluation.judging
    for line, one in zip(drawn.lines, part.contenders, strict=True):
        assert (line.x, line.y) == ([one.metrics["device_copies"].value], [one.metrics["balance"].value])
    assert [line.colour == GREY for line in drawn.lines] == [one.label == TODAY for one in part.contenders]
    copies, *_ = (line.x[0] for line in drawn.lines)
    assert drawn.rules == [(copies, "chosen")]
    moved = sum(
        expert // 2 != device
        for layer in range(3)
        for expert, device in enumerate(plan.placement.holds(layer).argmax(axis=1).tolist())
    )
    saved = contender_of(part, TODAY).metrics["device_copies"].value - copies
    said = section.body[0].lines[0]  # type: ignore[union-attr]
    assert said.startswith(f"{moved} of 24 experts live elsewhere")
    assert saved > 0
    assert f"the copies that {moved * 3 * 96 / (saved * 3):,.0f} tokens save" in said  # 3 x 96 hidden vectors an expert


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


def drawn_of(
    labels: list[str], *, devices: int = 4, layers: int = 3, steps: int = 5, **figures: float
) -> tuple[Part, dict[str, Any]]:
    """A part with contenders of random loads and copies, today last, and their tallies."""
    rng, rows, tallies = np.random.default_rng(0), list[Contender](), dict[str, Any]()
    metrics = {"balance": 1.5, "inter_bytes": 4e6, "intra_bytes": 1e6, "step_s": 1.0, "experts_s": 1.0} | figures
    for label in (*labels, TODAY):
        name, _, dispatch_model = label.rpartition("/")
        known = {name: Metric(value=value) for name, value in metrics.items()}
        rows.append(Contender(name=name, dispatch_model=dispatch_model, metrics=known))  # type: ignore[arg-type]
        tallies[label] = SimpleNamespace(
            loads=rng.integers(1, 99, (steps, layers, devices)),
            slots=np.ones(devices),
            between_per_step=rng.random((devices, devices)) * (1 - np.eye(devices)),
        )
    counts: dict[str, Any] = {"num_samples": 1, "num_tokens": 1, "num_steps": steps, "dropped_samples": 0}
    return Part(contenders=tuple(rows), tokens_per_step=1.0, **counts), tallies


@pytest.mark.parametrize(("devices", "plans"), [(512, 1), (512, 10)])
def test_many_layers_of_many_devices_stay_below_2_mb(tmp_path: Path, devices: int, plans: int) -> None:
    labels = [f"plan {number}/standard" for number in range(plans)]
    part, tallies = drawn_of(labels, devices=devices, layers=61, steps=10)
    traffic = known(traffic_section(part, tallies, [TODAY, *labels], TODAY, Cluster(64, 8)))
    loads = load_section(part, tallies, TODAY, labels)
    write_page(tmp_path / "p.html", "large", "", [loads, traffic])
    assert (tmp_path / "p.html").stat().st_size < 2e6
    assert "quantiles of 512 devices" in loads.body[0].lines[0]  # type: ignore[union-attr]
    heats, (about, *_) = pictures_in(traffic), traffic.body
    size = -(-512 // len(heats[0].table))
    assert about.lines[-1] == f"rows and columns are groups of {size} devices"  # type: ignore[union-attr]
    bytes_DD = tallies[labels[0]].between_per_step
    far_DD = np.kron(np.eye(64), np.ones((8, 8))) == 0
    each = np.where(far_DD, 4 / bytes_DD[far_DD].sum(), 1 / bytes_DD[~far_DD].sum())
    assert heats[1].table[0, 3] == pytest.approx((bytes_DD * each)[:size, 3 * size : 4 * size].sum())


def test_today_is_grey_in_every_picture_and_no_plan_is() -> None:
    labels = ["first/standard", "second/standard", "third/standard"]
    part, tallies = drawn_of(labels)
    now, *ours = [strip.lines[0].colour for strip in strips(part, tallies, TODAY, labels)]
    colours = {line.name: line.colour for line in histogram(part, tallies, TODAY, labels).lines}
    assert now == colours["today"] == GREY
    assert ours == [colours[label.partition("/")[0]] for label in labels]
    assert len({now, *ours}) == 4


def test_the_last_bin_of_the_histogram_is_drawn_and_says_that_it_holds_more() -> None:
    part, tallies = drawn_of(["plan/standard"], steps=40)
    tallies[TODAY].loads[:, :, :] = 7  # even: ratios of 1, and a little less by rounding
    tallies[TODAY].loads[0, 0, 0] = 10**6
    tallies[TODAY].loads = tallies[TODAY].loads * (1 - 1e-16)
    plot = histogram(part, tallies, TODAY, ["plan/standard"])
    assert "and more" in plot.x.title
    line = next(line for line in plot.lines if line.name == "today")
    assert np.sum(line.y) == pytest.approx(100)
    (stroke,) = re.findall(f'<path class="l{GREY}"[^>]* d="M([^"]*)"', plot.content()[0])
    points = [tuple(map(float, point.split())) for point in stroke.split("L")]
    assert points[-1][0] == max(x for x, _ in points) == 392  # the axis's end
    assert points[-1][1] == points[-2][1]


def test_layers_of_a_strip_have_whole_numbers() -> None:
    for layers in (1, 2, 70):
        part, tallies = drawn_of(["plan/standard"], layers=layers)
        ticks = next(strips(part, tallies, TODAY, ["plan/standard"])).y.ticks
        assert [words for _, words in ticks] == [str(int(at)) for at, _ in ticks]
        assert len(ticks) <= 9


def test_today_has_a_bar_beside_however_many_plans_and_the_rest_is_counted() -> None:
    part, _ = drawn_of([f"plan {number}/standard" for number in range(12)])
    section = known(time_section(part, TODAY, whole=True))
    (bars,) = pictures_in(section)
    assert [bar.name for bar in bars.bars] == [f"plan {number}" for number in range(9)] + ["today"]
    assert section.body[0].lines[-1] == "3 more: in the tables"  # type: ignore[union-attr]


def test_parts_of_one_bar_have_colours_of_their_own() -> None:
    absent = itertools.product((SOURCES, (*UNCUT, *PASSES)), ("home_s", "sums_s"), ("kv_s", "folding_s"))
    for parts, *two in absent:
        assert len({PARTS[name] for name in parts if name not in two}) == len(parts) - 2


def test_copies_rarer_than_one_a_step_keep_their_bytes_and_gathered_bytes_are_told() -> None:
    part, tallies = drawn_of(["plan/coherent"], kv_bytes=7e6)
    rare = tallies["plan/coherent"]
    rare.between_per_step = rare.between_per_step / 100
    rare.between_per_step[:2, :2] = rare.between_per_step[2:, 2:] = 0  # none inside nodes
    section = known(traffic_section(part, tallies, ["plan/coherent"], TODAY, Cluster(2, 2)))
    (heat,) = pictures_in(section)
    assert heat.table.sum() == pytest.approx(4.0)
    table: Any = section.body[-1]
    assert [(column.header, column.cells) for column in table.columns][-1] == ("MB of K and V", ["7"])
    assert "K and V" in section.body[0].lines[1]  # type: ignore[union-attr]


def test_pairs_of_devices_are_those_of_a_loop_over_tokens(make_trace: Any, tmp_path: Path) -> None:
    trace = make_trace(samples=63, tokens=6, ranks=4, columns=("step", "sample", "source_rank"), top_k=3)
    plan = edited(planned(trace, "eplb", "2x2", fit_fraction=1.0, tokens_per_step=None), "seed", 0)
    shown = PlanPage(plan, tmp_path / "plan.json", recount(plan, trace.path, keep=True), None)
    part, today, _ = known(shown.shown)
    (heat,) = pictures_in(known(traffic_section(part, shown.tallies, [today], today, plan.cluster)))
    sent = np.zeros((4, 4))
    for batch in trace.batches():
        for home, token in zip(batch.source_rank, batch.ids, strict=True):
            for layer in token:
                for device in {int(expert) // 2 for expert in layer} - {int(home)}:
                    sent[home, device] += 1
                    sent[device, home] += 1
    far = np.kron(np.eye(2), np.ones((2, 2))) == 0
    for mask in (far, ~far):
        np.testing.assert_allclose(heat.table[mask] / heat.table[mask].sum(), sent[mask] / sent[mask].sum())


def test_recorded_steps_are_told_with_their_samples(make_trace: Any, tmp_path: Path) -> None:
    trace = make_trace(samples=63, tokens=6, columns=("step", "sample"))
    plan = planned(trace, "netmoe", "2x2", tokens_per_step=None, to=tmp_path / "plan.json")
    shown = PlanPage(plan, tmp_path / "plan.json", recount(plan, trace.path, folder=tmp_path, keep=True), None)
    fit = plan.evaluation.fit
    assert fit.num_samples > fit.num_steps > 1
    shown.write(tmp_path / "report.html")
    said = f"{fit.num_tokens:,} tokens, steps: {fit.num_steps:,} of {fit.num_samples:,} samples"
    assert said in (tmp_path / "report.html").read_text()


def test_transitions_are_parted_by_devices_and_replicas_are_not_drawn(make_trace: Any, tmp_path: Path) -> None:
    trace = make_trace(samples=60)
    plan = planned(trace, "exflow", "2x2")
    task = recount(plan, trace.path, keep=True).task
    *_, section = strategy("exflow").pictures(plan, tmp_path, task)
    today, ours, *_ = pictures_in(section)
    assert today.borders == ours.borders == [2, 4, 6]
    counts = count(trace, pairs="top1").transitions[0]
    order = [np.argsort(plan.placement.holds(layer).argmax(axis=1), kind="stable") for layer in (0, 1)]
    for picture, (rows, columns) in ((today, [np.arange(8)] * 2), (ours, order)):
        shares = counts[np.ix_(rows, columns)] / np.maximum(counts[rows].sum(axis=1, keepdims=True), 1)
        np.testing.assert_allclose(picture.table, shares)
    uneven = make_trace(samples=60, experts=6)  # in eight slots
    plan = planned(uneven, "exflow", "2x2")
    *_, section = strategy("exflow").pictures(plan, tmp_path, recount(plan, uneven.path, keep=True).task)
    assert "not drawn" in section.body[0].lines[0]  # type: ignore[union-attr]


def test_the_card_cuts_long_titles_and_answers_visibly(trace: Any, tmp_path: Path, monkeypatch: Any) -> None:
    plan = edited(planned(trace, "eplb", "2x2"), "model.name", "m" * 200)
    monkeypatch.setattr(card_module, "answer", lambda _: "word " * 400)
    shown = PlanPage(plan, tmp_path / "plan.json", recount(plan, keep=True), None)
    shown.write(tmp_path / "card.svg")
    texts = [one.text or "" for one in ElementTree.parse(tmp_path / "card.svg").getroot().iter(f"{SVG}text")]
    assert len(texts[0]) <= 44
    assert "..." in texts[0]
    assert [text for text in texts if text.endswith("word ...")]


@pytest.mark.parametrize("value", ["benefit", "none"])
def test_commands_quote_the_plan_and_none_is_given_where_there_is_nothing_to_apply(trace: Any, value: str) -> None:
    plan = edited(planned(trace, "eplb", "2x2"), "verdict.value", value)
    plan = edited(edited(plan, "verdict.gain.low", -1.0), "verdict.gain.high", -0.5)
    rows = per_engine(plan, Path("my plans/a.json"))
    commands = [row for row in rows.values() if "--engine" in row and row.startswith("moeplan")]
    assert commands
    for command in commands:
        words = shlex.split(command)
        assert words[2] == "my plans/a.json"
        assert ("--force" in words) == (value == "none")
    assert (rows["moeplan.runtime"] == "nothing to apply") == (value == "none")
