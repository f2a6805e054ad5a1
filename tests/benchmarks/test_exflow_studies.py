"""ExFlow's growth, the pictures of docs/exflow.md, and the paper's figures reproduced, against counts by hand."""

import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cases.exflow import growth, real, reference
from benchmarks.cases.exflow.reference import Known
from benchmarks.cases.exflow.trail import Trail, annealed, chained, swept
from benchmarks.cases.exflow_paper import shares, shift
from benchmarks.cases.exflow_paper.kept import HIDDEN, TOKENS_EACH, Kept, exchange_s, in_order, nodes_of, placed
from benchmarks.cases.exflow_paper.tokens import Draw, enough, learned
from benchmarks.exflow_reference import instance
from benchmarks.routing import GPT_OSS, Routing, drawn, embedded, markov, transitions
from benchmarks.study import Row, Settings
from docs import draw
from docs.draw import Placed
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import contiguous
from moeplan.solvers.placement import Placement
from tests.builders import known

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
    assert growth.reached(MADE, 0.6) == {"annealing: 99 %": 5, "annealing > sweeps": 2}
    assert growth.reached(MADE, 0.795) == {"annealing: 99 %": 5, "annealing > sweeps": 9}
    assert growth.reached(MADE, 0.8) == {"annealing: 99 %": 5}


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


def test_a_point_of_growth_has_a_row_for_every_curve() -> None:
    size = replace(growth._sizes(Settings(quick=True))[1], budget_s=SHORT_S)
    rows = {row.method: row for row in growth._rows(size)}
    assert {"chain", "sweeps", "annealing: 99 %"} <= set(rows)
    assert all(row.axis == size.axis and row.size == size.size and row.memory_bytes for row in rows.values())
    settled = rows["annealing: 99 %"]
    assert known(settled.seconds) <= settled.more["in all, s"]


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
    assert (found.more["at 99.5 % or more"], found.more["instances"], found.more["below the sweeps"]) == (1, 2, 0)
    assert known(rows["sweeps"].quality) <= 0.75 + 1e-12


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


def test_the_page_shows_every_picture_that_is_drawn() -> None:
    drawn = {f"pictures/{path.name}" for path in draw.FOLDER.iterdir()} - {"pictures/flow.svg"}  # README's, by hand
    assert set(SHOWN) == drawn == {f"pictures/{name}.svg" for name in ("heatmap", "layers", "anytime")}
    assert all((ROOT / "docs" / name).stat().st_size < LARGEST_BYTES for name in drawn)


def test_without_real_routing_it_says_what_is_missing_and_exits_with_3(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "docs.draw", "--data", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.startswith("error: no gpt-oss-20b/routing.npz in ")
    assert len(done.stderr.splitlines()) == 1


def test_the_blocks_of_the_heat_map_hold_the_share_in_its_title() -> None:
    rng = np.random.default_rng(0)
    fit, unseen = (markov(rng, 4, 16) for _ in range(2))
    trail = Trail(contiguous.solve(4, 16, Cluster(1, 8)).placement, ((1.0, 0.1), (2.0, 0.2)), 0.5)
    for panel in draw.heat_map(Placed(fit, unseen, trail, [trail] * 2)).axes[:2]:
        cells = np.asarray(panel.images[0].get_array())
        inside = sum(cells[at : at + 2, at : at + 2].sum() for at in range(0, 16, 2))
        assert cells.sum() == pytest.approx(1)
        assert panel.get_title().endswith(f": {100 * inside:.0f} % stay")


def tokens_of(seed: int, num_tokens: int, num_experts: int = 8, alpha: float = 0.1) -> Array:
    """Tokens of a chain of four layers, `[T, 4]`."""
    rng = np.random.default_rng(seed)
    return drawn(rng, markov(rng, 4, num_experts, alpha), num_tokens)


def devices_of(ids: Array, placement: Placement) -> Array:
    """The device of every token in every layer, `[T, L]`."""
    homes = [placement.holds(layer).tolist() for layer in range(ids.shape[1])]
    return np.array([[homes[layer][expert].index(True) for layer, expert in enumerate(row)] for row in ids.tolist()])


@given(st.dictionaries(st.integers(1, 9), st.sampled_from((0.0, 0.4, 0.5, 0.6)), min_size=1))
@settings(max_examples=50)
def test_enough_is_the_smallest_size_that_no_larger_one_contradicts(found: dict[int, float]) -> None:
    good = [size for size in found if all(share >= 0.5 for other, share in found.items() if other >= size)]
    assert enough(found, 0.5) == min(good, default=None)


def test_transitions_are_balanced_and_drawn_tokens_follow_them() -> None:
    rng = np.random.default_rng(0)
    weights = markov(rng, 3, 6, 0.3)
    assert np.allclose(weights.sum(axis=1), 1, atol=1e-3)
    assert np.allclose(weights.sum(axis=2), 1)
    ids = drawn(rng, weights, 60_000)
    counted = np.zeros((2, 6, 6))
    for row in ids[:3000].tolist():
        for at, (here, there) in enumerate(itertools.pairwise(row)):
            counted[at, here, there] += 1
    assert (counted == transitions(ids[:3000], 6)).all()
    assert np.abs(transitions(ids, 6) / 10_000 - weights).max() < 0.02


def test_what_is_kept_is_what_tokens_do_one_by_one() -> None:
    ids = tokens_of(0, 500)
    placement = placed(transitions(ids, 8), nodes_of(8))
    device = devices_of(ids, placement)
    hops = list(itertools.chain.from_iterable(itertools.pairwise(row) for row in device.tolist()))
    kept = Kept.of(transitions(ids, 8), placement)
    assert kept.device == pytest.approx(np.mean([a == b for a, b in hops]))
    assert kept.node == pytest.approx(np.mean([a // 4 == b // 4 for a, b in hops]))
    busiest = [np.bincount(device[:, layer], minlength=8).max() for layer in range(4)]
    assert kept.balance == pytest.approx(np.mean(busiest) / (500 / 8))


def test_the_exchange_takes_what_the_busiest_port_of_the_slower_link_takes() -> None:
    ids = tokens_of(1, 8 * TOKENS_EACH)
    placement = in_order(transitions(ids, 8), 8)
    device, expected_s = devices_of(ids, placement), 0.0
    for layer in range(3):
        sent = {"intra": np.zeros((2, 8)), "inter": np.zeros((2, 8))}
        for here, there in zip(device[:, layer].tolist(), device[:, layer + 1].tolist(), strict=True):
            if here != there:
                kind = "intra" if here // 4 == there // 4 else "inter"
                sent[kind][0, here] += 1
                sent[kind][1, there] += 1
        bytes_each = 2 * HIDDEN
        inter_s = 5e-6 + sent["inter"].max() * bytes_each / 12.5e9
        expected_s += max(inter_s, 2e-6 + sent["intra"].max() * bytes_each / 300e9)
    assert exchange_s(transitions(ids, 8), placement) == pytest.approx(expected_s)


def test_fewer_tokens_gain_less_and_all_of_them_everything() -> None:
    ids = tokens_of(2, 3000, num_experts=16, alpha=0.3)
    full = transitions(ids, 16)
    found = learned(Draw(ids, full, full), 8)
    assert 0 < found.points[100].share < 0.95 < found.points[1000].share
    assert found.points[3000].share == pytest.approx(1)
    base, best = (Kept.of(full, one) for one in (in_order(full, 8), placed(full, nodes_of(8))))
    assert found.full.speed_up > 1
    assert base.node < best.node


def test_data_routed_alike_keeps_its_affinity_and_data_routed_otherwise_loses_it() -> None:
    ids, sample = tokens_of(3, 6000), np.arange(6000) // 10
    profiled = sample < 300
    alike = shift.shifted(Routing(ids, sample, 8), profiled, seed=0)
    otherwise = np.where(profiled[:, None], ids, tokens_of(4, 6000))
    other = shift.shifted(Routing(otherwise, sample, 8), profiled, seed=0)
    assert alike.device == pytest.approx(1, abs=0.05)
    assert alike.node == pytest.approx(1, abs=0.05)
    assert other.device < 0.6
    assert other.same == alike.same


def test_figures_7_and_8_stand_beside_the_paper_and_below_their_bounds() -> None:
    weights = markov(np.random.default_rng(0), 4, 16)
    rows = list(shares._rows(shares.Placements("made", lambda: [(weights, weights)], (4, 8), stated=True)))
    at: dict[tuple[str, str], Row] = {(row.instance, row.method): row for row in rows}
    assert [row.instance for row in rows if row.method == "paper"] == ["4 GPUs", "8 GPUs", "mean of nodes"]
    order, alone = (at["8 GPUs", name].quality or 0 for name in ("in order", "GPUs alone"))
    assert order < alone <= (at["8 GPUs", "GPUs alone"].bound or 0)
    assert at["8 GPUs", "GPUs alone"].more[shares.SAVED] == pytest.approx((alone - order) / (1 - order))
    near, base = (at["2 nodes", name].quality or 0 for name in ("nodes first", "in order"))
    assert at["mean of nodes", "nodes first"].more[shares.TIMES] == pytest.approx(near / base)


def test_the_embedded_trace_splits_by_whole_samples() -> None:
    routing = embedded()
    half = routing.half(0)
    assert 0.4 < half.mean() < 0.6
    assert not set(routing.sample[half].tolist()) & set(routing.sample[~half].tolist())
    both = [one.sum() for one in routing.halves(1)[0]]
    assert sum(both) == len(routing.ids) * (routing.ids.shape[1] - 1)
