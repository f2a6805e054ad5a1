"""The pieces of the reproduction of ExFlow's figures, against counts by hand."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cases.exflow_paper import shares, shift, tokens
from benchmarks.cases.exflow_paper.kept import HIDDEN, TOKENS_EACH, Kept, exchange_s, in_order, nodes_of, placed
from benchmarks.cases.exflow_paper.tokens import Draw, enough, learned
from benchmarks.routing import Routing, drawn, embedded, markov, transitions
from benchmarks.study import DEFAULT_DATA, Row
from moeplan.solvers.placement import Placement

Array = np.ndarray
PAPER = DEFAULT_DATA.parent / "papers" / "exflow.txt"


def tokens_of(seed: int, num_tokens: int, num_experts: int = 8, alpha: float = 0.1) -> Array:
    """Tokens of a chain of four layers, `[T, 4]`."""
    rng = np.random.default_rng(seed)
    return drawn(rng, markov(rng, 4, num_experts, alpha), num_tokens)


def devices_of(ids: Array, placement: Placement) -> Array:
    """The device of every token in every layer, `[T, L]`."""
    homes = [placement.holds(layer).tolist() for layer in range(ids.shape[1])]
    return np.array([[homes[layer][expert].index(True) for layer, expert in enumerate(row)] for row in ids.tolist()])


@given(st.dictionaries(st.integers(1, 9), st.sampled_from((0.0, 0.4, 0.5, 0.6)), min_size=1))
@settings(deadline=None, max_examples=50)
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


def test_tokens_that_always_follow_one_another_are_learned_from_a_few() -> None:
    ids = np.tile(np.random.default_rng(0).permuted(np.tile(np.arange(8), (4, 1)), axis=1).T, (400, 1))
    ids = np.random.default_rng(0).permutation(ids)
    found = learned(Draw(ids, transitions(ids, 8), transitions(ids, 8)), 8)
    assert list(found.points) == [100, 300, 1000, 3000]
    assert all(point.share == pytest.approx(1) for point in found.points.values())
    assert found.full.speed_up > 10  # what is left is latency


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


@pytest.mark.skipif(not PAPER.exists(), reason="no papers/exflow.txt beside ../shared/data")
def test_the_papers_figures_stand_in_its_text() -> None:
    text = " ".join(Path(PAPER).read_text().split())
    for level, title in enumerate(("Intra-GPU", "Intra-Node")):
        found = re.search(rf"{title} ([|.\d ]+)", text)
        assert found is not None
        ratios = [float(one) for one in re.findall(r"[\d.]+", found[1])]
        assert ratios == [one[level] for one in shift.TABLE_III.values()]
    for experts, stated in tokens.FIGURE_13.items():
        assert re.search(rf"MoE-{experts} models, {stated} tokens are (enough|sufficient)", text)
    assert f"average {shares.FIGURE_8:g}x more likely to stay within the same node" in text
    (_, saved_4), (stays_8, _), (stays_32, saved_32) = (shares.FIGURE_7[size] for size in (4, 8, 32))
    for words in (
        f"{saved_4:.0%} of communication is saved when using 4 GPUs, and {saved_32:.0%} is saved when using 32 GPUs",
        f"When scaling out to 8 GPUs, our expert affinity design can keep {stays_8:.0%} tokens",
        f"with 32 GPUs, we can still maintain it at {stays_32:.0%}",
    ):
        assert words in text
