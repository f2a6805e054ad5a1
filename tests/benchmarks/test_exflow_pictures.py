"""The pictures of docs/exflow.md."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cases.exflow.trail import Trail
from benchmarks.routing import markov
from docs import draw
from docs.draw import Placed
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import contiguous
from moeplan.solvers.cost import hops_kept

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
