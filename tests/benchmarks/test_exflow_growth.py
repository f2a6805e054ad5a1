"""Searches second by second, shares of the best known, on made-up figures, and the pictures of docs/exflow.md."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cases.exflow import growth, real, reference
from benchmarks.cases.exflow.reference import Known
from benchmarks.cases.exflow.trail import Trail, annealed, chained, swept
from benchmarks.exflow_reference import instance
from benchmarks.routing import GPT_OSS, markov, transitions
from benchmarks.study import Row, Settings
from docs import draw
from docs.draw import Placed
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import contiguous
from moeplan.solvers.cost import hops_kept
from moeplan.solvers.placement import Placement

Array = np.ndarray
PLACEMENT = contiguous.solve(2, 4, Cluster(1, 2)).placement
MADE = Trail(PLACEMENT, ((1.0, 0.5), (2.0, 0.78), (5.0, 0.795), (9.0, 0.8), (20.0, 0.8)), 0.9)
SHORT_S = 0.02


def naive_share(weights: Array, placement: Placement) -> float:
    """What stays on its device, pair of experts by pair."""
    homes = placement.holds
    kept = sum(
        weight
        for cut, weight_EE in enumerate(weights)
        for (a, b), weight in np.ndenumerate(weight_EE)
        if (homes(cut)[a] & homes(cut + 1)[b]).any()
    )
    return float(kept / weights.sum())


def test_a_share_is_reached_at_the_first_step_that_keeps_it() -> None:
    assert [MADE.until(share) for share in (0.0, 0.5, 0.51, 0.795, 0.8, 0.81)] == [1, 1, 2, 5, 9, None]
    assert (MADE.seconds, MADE.kept) == (20, 0.8)


def test_annealing_settles_at_99_percent_of_its_end_and_passes_sweeps_only_with_more() -> None:
    assert growth.reached(MADE, 0.6) == {"annealing: 99%": 5, "annealing > sweeps": 2}
    assert growth.reached(MADE, 0.795) == {"annealing: 99%": 5, "annealing > sweeps": 9}
    assert growth.reached(MADE, 0.8) == {"annealing: 99%": 5}


def test_a_search_ends_with_what_its_placement_keeps_and_work_alone_ends_it() -> None:
    weights = instance("4x8x4", 5)
    one, other = (annealed(weights, 4, SHORT_S, seed=3) for _ in range(2))
    assert one.kept == pytest.approx(naive_share(weights, one.placement))
    assert [kept for _, kept in one.steps] == [kept for _, kept in other.steps]
    assert list(one.steps) == sorted(one.steps)
    assert one.kept <= one.bound


def test_the_chain_keeps_what_it_says_and_the_sweeps_no_less() -> None:
    weights = instance("12x8x4", 5)
    together = chained(weights, 4)
    assert (together.sum(axis=1) == 2).all()
    assert (together.sum(axis=2) == 2).all()
    assert weights[together].sum() / weights.sum() <= swept(weights, 4).kept


def test_every_size_holds_whole_experts_and_the_largest_are_a_thousand_devices() -> None:
    asked = growth._sizes(Settings(full=True))
    assert max(size.shape[2] for size in asked) == 1024
    assert {58, 256} <= {number for size in asked for number in size.shape[:2]}
    assert all(experts % devices == 0 for _, experts, devices in (size.shape for size in asked))
    assert len({(size.axis, size.size) for size in asked}) == len(asked)


def test_a_point_of_growth_has_a_row_for_every_curve() -> None:
    size = replace(growth._sizes(Settings(quick=True))[1], budget_s=SHORT_S)
    rows = {row.method: row for row in growth._rows(size)}
    assert {"chain", "sweeps", "annealing: 99%"} <= set(rows)
    assert all(row.axis == size.axis and row.size == size.size and row.memory_bytes for row in rows.values())
    settled = rows["annealing: 99%"]
    assert settled.seconds is not None
    assert settled.seconds <= settled.more["in all, s"]


def test_instances_without_a_known_share_are_left_out(tmp_path: Path) -> None:
    best = {"4x8x4/0": {"share": 0.5, "optimal": True}, "4x8x4/2": {"share": 0.6, "optimal": False}}
    path = tmp_path / "best.json"
    path.write_text(json.dumps(best))
    assert Known.of(path, "4x8x4", range(10), 1.0) == Known("4x8x4", {0: 0.5, 2: 0.6}, 1, 1.0)
    assert Known.of(path, "4x8x4", (0, 1), 1.0).shares == {0: 0.5}
    assert Known.of(path, "8x16x4", range(10), 1.0).shares == {}


def test_shares_are_of_the_best_known_and_the_least_stands_apart() -> None:
    best = {seed: annealed(instance("4x8x4", seed), 4, 1.0).kept for seed in (0, 9)}
    rows = {row.method: row for row in reference.rows(Known("4x8x4", {0: best[0], 9: 2 * best[9]}, 0, 1.0))}
    found = rows["annealing 1 s"]
    assert found.quality == pytest.approx(0.75)
    assert found.more["least, %"] == pytest.approx(0.5)
    assert (found.more["at 99.5% or more"], found.more["instances"], found.more["below the sweeps"]) == (1, 2, 0)
    assert rows["sweeps"].quality is not None
    assert rows["sweeps"].quality <= 0.75 + 1e-12


def test_real_routing_is_fitted_on_even_samples_and_judged_on_odd_ones(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids, sample = rng.integers(8, size=(400, 3)), np.repeat(np.arange(40), 10)
    path = tmp_path / GPT_OSS
    path.parent.mkdir()
    np.savez(path, expert_ids=ids[:, :, None], seq_id=sample, num_experts=8)
    case = replace(real._cases(Settings(data=tmp_path))[0], budgets_s=(SHORT_S,))
    rows: dict[str, Row] = {row.method: row for row in real._rows(case)}
    fit, unseen = (transitions(ids[sample % 2 == part], 8) for part in (0, 1))
    trail = annealed(fit, case.num_devices, SHORT_S)
    found = rows[f"annealing {SHORT_S:g} s"]
    assert found.quality == pytest.approx(naive_share(unseen, trail.placement))
    assert found.more["fitted, %"] == pytest.approx(naive_share(fit, trail.placement))
    assert rows["sweeps"].ratio == 1


ROOT = Path(__file__).parents[2]
SHOWN = re.findall(r"!\[[^]]+\]\((pictures/[a-z]+\.svg)\)", (ROOT / "docs" / "exflow.md").read_text())
LARGEST_BYTES = 150_000


def placed() -> Placed:
    """Random routing whose every search found experts in their own order."""
    rng = np.random.default_rng(0)
    fit, unseen = (markov(rng, 4, 16) for _ in range(2))
    trail = Trail(contiguous.solve(4, 16, Cluster(1, 8)).placement, ((1.0, 0.1), (2.0, 0.2)), 0.5)
    return Placed(fit, unseen, trail, [trail] * 2)


def test_the_page_shows_every_picture_that_is_drawn() -> None:
    drawn = {f"pictures/{path.name}" for path in draw.FOLDER.iterdir()}
    assert set(SHOWN) == drawn == {f"pictures/{name}.svg" for name in ("heatmap", "layers", "anytime")}
    assert all((ROOT / "docs" / name).stat().st_size < LARGEST_BYTES for name in drawn)


def test_without_real_routing_it_says_what_is_missing_and_exits_with_3(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "docs.draw", "--data", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.startswith("error: no gpt-oss-20b/routing.npz in ")
    assert len(done.stderr.splitlines()) == 1


def test_the_blocks_of_the_heat_map_hold_the_share_in_its_title() -> None:
    made = placed()
    for panel in draw.heat_map(made).axes[:2]:
        cells = np.asarray(panel.images[0].get_array())
        inside = sum(cells[at : at + 2, at : at + 2].sum() for at in range(0, 16, 2))
        assert cells.sum() == pytest.approx(1)
        assert panel.get_title().endswith(f": {inside:.0%} stay")


def test_lines_by_layer_are_below_their_bound_and_name_the_whole_share() -> None:
    made = placed()
    left, right = draw.by_layer(made).axes
    bound, *lines = (np.asarray(line.get_ydata()) for line in left.lines)
    assert all((line <= bound).all() for line in lines)
    assert len(lines) == len(right.lines) == 3
    whole = hops_kept(made.unseen, made.plain, 8).device.sum() / made.unseen.sum()
    assert f"contiguous: {whole:.1%}" in [line.get_label() for line in right.lines]
