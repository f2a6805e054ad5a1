"""What screens say of a pipeline: the choices, what overlap can hide, what is no overlap, what changes nothing."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moeplan.planner.options import PipelineOptions
from moeplan.planner.pipeline.superadditive import curve_gain
from moeplan.planner.pipeline.timeline import timeline_picture
from moeplan.planner.reports.plan import show_report
from moeplan.planner.tables.seconds import TimeUnit
from moeplan.runtime.plan import Plan
from moeplan.solvers.pipemoe import simulate
from tests.planner.edits import edited
from tests.planner.pipeline.pipelines import make_plan, options, training


@pytest.fixture(scope="module")
def plan(make_trace: Any, make_profile: Any) -> Plan:
    return make_plan(make_trace(samples=60, tokens=200), make_profile(noise=0.0))


def screen(plan: Plan) -> str:
    console = Console(width=120, record=True, highlight=False, markup=False)
    show_report(plan, Path("plan.json"), console)
    return " ".join(console.export_text().split())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_degree": 2}, ["(up to 2, half duplex)", "at most 2 "]),
        ({"max_degree": 40}, ["(up to 40, half duplex)", "at most 32 "]),
        ({"full_duplex": True}, ["full duplex", "overlap can hide at most", "dispatch ", "combine "]),
        ({"joint": True}, ["--joint without effect: no backward pass"]),
    ],
    ids=str,
)
def test_what_was_chosen_from_is_on_every_screen(
    make_trace: Any, make_profile: Any, changes: Any, words: list[str]
) -> None:
    found = make_plan(make_trace(samples=40, tokens=60), make_profile(), **changes)
    text = screen(found)
    assert [one for one in words if one not in text] == []
    assert text.split("(up to")[1].split(")")[0] in next(iter(timeline_picture(found, 0, 80)))


def test_one_degree_for_both_passes_is_said_of_training(make_trace: Any, make_profile: Any, tmp_path: Path) -> None:
    found = make_plan(training(make_trace(samples=40), tmp_path), make_profile(), joint=True, max_degree=3)
    assert "(up to 3, half duplex, one for both passes)" in screen(found)


def test_with_full_duplex_all_but_the_longest_stage_can_be_hidden(plan: Plan) -> None:
    found = edited(plan, "options/pipeline/full_duplex", True)
    assert found.evaluation is not None
    for contender in found.evaluation.held_out.contenders if found.evaluation.held_out else ():
        if contender.name == "degree_1":
            figures = [contender.metrics[f"{name}_s"].value for name in ("dispatch", "experts", "combine")]
    said, unit = screen(found).split("overlap can hide at most ")[1].split()[:2]
    hidden = (sum(figures) - max(figures)) * {"us": 1e6, "ms": 1e3}[unit]
    assert float(said.replace(",", "")) == pytest.approx(hidden, rel=0.01)


def test_a_plan_in_one_piece_is_no_gain_of_nothing(make_trace: Any, make_profile: Any) -> None:
    text = screen(make_plan(make_trace(samples=40), make_profile(), max_degree=1))
    assert "one piece is taken in every layer" in text
    assert "a step takes" not in text


def test_a_plan_that_finds_no_unequal_chunks_says_so(plan: Plan) -> None:
    degrees = plan.model_dump(mode="json")["decisions"]["pipeline"]["forward"]
    shares = {"forward": [[1 / degree] * degree for degree in degrees], "backward": None}
    found = edited(plan, "decisions/pipeline", lambda x: x | {"shares": shares}, hashed=True)
    assert f"none of {len(degrees)} passes of layers is faster in unequal chunks" in screen(found)
    assert "engine that is exported to" not in screen(found)


def test_where_chunks_compute_faster_than_the_whole_that_part_of_the_gain_is_told(plan: Plan) -> None:
    """The whole takes 3 times as long as the plan says: a chunk is then below its part."""
    assert curve_gain(plan, options(plan))[1] == pytest.approx(0, abs=1e-9)
    assert "no overlap" not in screen(plan)
    bent = edited(plan, "options/pipeline/whole/experts_s", lambda x: [[3 * one[0]] for one in x])
    said = PipelineOptions.model_validate(dict(bent.options["pipeline"]))
    pipeline, gained, lost = bent.decisions.pipeline, 0.0, 0.0
    assert pipeline is not None
    for layer, degree in enumerate(pipeline.forward):
        dispatch, experts, combine = (column[layer] * degree for _, column in said.forward)
        whole = [column[layer][0] for _, column in said.whole]
        least = [max(one, whole[1] / degree) for one in experts]
        taken, honest = (simulate(dispatch, one, combine)[-1].end_s for one in (experts, least))
        gained, lost = gained + sum(whole) - taken, lost + honest - taken
    assert 0.1 < lost / gained < 1
    assert curve_gain(bent, said) == pytest.approx((gained, lost))
    words = f"of {TimeUnit.worded(gained)} that chunks save on the fitted steps, {TimeUnit.worded(lost)} are no overlap"
    assert words in screen(bent)
