"""Predicted seconds against formulas: profiles whose curves are known, and tokens walked by hand."""

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import InputError
from moeplan.planner.evaluate.chunks import Cut, Cuts, Pipeline
from moeplan.planner.evaluate.costs import MOVED, CostModel
from moeplan.planner.evaluate.journey import Journey
from moeplan.planner.evaluate.price import price
from moeplan.planner.evaluate.replay import replay
from moeplan.planner.evaluate.scene import Passes, Scene
from moeplan.planner.evaluate.units import index_samples, index_units
from moeplan.profilers.cases import CASES
from moeplan.profilers.cases.routed_exchange import copies_DD, ways
from moeplan.profilers.cluster import Cluster, Link
from moeplan.profilers.description import describe, on_cluster
from moeplan.profilers.fits.fit import Fit, Prediction
from moeplan.profilers.fits.fitting import fit_arrays, fit_series
from moeplan.profilers.fits.laws import SEQUENCES, AlphaBeta, AttentionLaw
from moeplan.profilers.fits.surface import Surface
from moeplan.profilers.measurement import Measurement
from moeplan.profilers.origin import Noise
from moeplan.profilers.presets import load_preset
from moeplan.profilers.profile import Profile, load, save
from moeplan.profilers.series import Series
from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.solvers.seconds import Curve3, exchange_seconds
from moeplan.traces.model import Attention, Latent
from tests.builders import known, measured_profile, model, series
from tests.planner.makers import in_several_steps, judged, planned, scene_of, sized, tokens

HALVES = Placement.from_sets([[[0, 1, 2, 3], [4, 5, 6, 7]]] * 3, 8)
IN_FLOATS = replace(model(), hidden_size=8, ffn_size=8, dtype_bytes=4)
MERGE = "moeplan profile --merge"
UNATTENDED = ("all_to_all", "all_gather", "expert_ffn")


def priced(scene: Scene, journey: Journey) -> dict[str, Any]:
    """Seconds of every step `[B]` by metric, in the middle of what may err."""
    ((tally,),) = replay(scene, [journey], ports=True)
    return {name: levels_QB[1] for name, levels_QB in price(tally, journey, scene).levels.items()}


@pytest.mark.parametrize(("dispatch", "top_k"), [("standard", 2), ("coherent", 2), ("coherent", 1)])
def test_a_step_is_what_the_formulas_behind_the_profile_give(
    make_trace: Any, make_profile: Any, dispatch: Any, top_k: int
) -> None:
    """Two devices, samples of 10 tokens at home on their ordinal mod 2; every token walked in Python."""
    trace = make_trace(samples=8, top_k=top_k)
    parts = priced(scene_of(trace, "1x2", profile=make_profile("1x2", noise=0.0)), Journey(dispatch, HALVES))
    expected = naive(tokens(trace), dispatch)
    assert expected.keys() <= parts.keys()
    for name, seconds in expected.items():
        np.testing.assert_allclose(parts[name], seconds, rtol=0.03, err_msg=name)
    assert ("kv_s" in parts) == (dispatch == "coherent")
    np.testing.assert_allclose(parts["step_s"], sum(parts[name] for name in expected))


def naive(ids: Any, dispatch: str) -> dict[str, Any]:
    """Seconds of the parts by step from the formulas of the fixture."""
    names = ["attention_s", "dispatch_s", "experts_s", "combine_s"]
    if dispatch == "coherent":
        names += ["kv_s", "counts_s", "home_s"]
    seconds = {name: np.zeros(2) for name in names}
    start = here = np.repeat(np.arange(8) % 2, 10)
    position, step_of = np.tile(np.arange(10), 8), np.repeat(np.arange(8) // 4, 10)
    for layer in range(3):
        devices = ids[:, layer] // 4
        after = devices[:, 0] if dispatch == "coherent" else here
        for step in (0, 1):
            rows = step_of == step
            held = [rows & (here == d) for d in (0, 1)]
            counts = [(held[d].sum(), (2 * position[held[d]] + 1).sum()) for d in (0, 1)]
            seconds["attention_s"][step] += max(attention(int(n), int(c)) for n, c in counts)
            out = [int((held[d] & (devices == 1 - d).any(axis=1)).sum()) for d in (0, 1)]
            back = [int((rows & (after == d) & (devices == 1 - d).any(axis=1)).sum()) for d in (0, 1)]
            seconds["dispatch_s"][step] += 20e-6 + 1e-9 * 128 * max(out)
            if ids.shape[2] > 1 or dispatch == "standard":  # else every token is where it lives next
                seconds["combine_s"][step] += 20e-6 + 1e-9 * 128 * max(back)
            pairs = max(int((devices[rows] == d).sum()) for d in (0, 1))
            seconds["experts_s"][step] += 40e-6 + 1e-10 * 3 * pairs * 64 * 96
            if dispatch == "coherent":
                seconds["kv_s"][step] += 30e-6 + 2e-9 * 32 * max(int(one.sum()) for one in held)
        here = after
    if dispatch == "coherent":
        for step in (0, 1):
            moved = [int(((step_of == step) & (here == d) & (start == 1 - d)).sum()) for d in (0, 1)]
            seconds["home_s"][step] += 20e-6 + 1e-9 * 128 * max(moved)
            seconds["counts_s"][step] += (2 + 3) * 30e-6  # samples twice, then the tokens before each layer
    return seconds


@pytest.mark.parametrize("passes", [None, Passes(0.0, full_duplex=False)], ids=["whole", "chunks"])
def test_ranks_tell_one_another_what_steps_are_split_and_samples_moved_by(
    make_trace: Any, make_profile: Any, passes: Any
) -> None:
    """By a gather of a second a byte: pairs of each expert; pairs and copies of each of two samples; numbers."""
    trace, profile = make_trace(samples=8), make_profile("1x2", noise=0.0)

    def gathered(port: Any) -> Prediction:
        return Prediction(port, port, port, port > 0)

    twice = Placement.from_sets([[[0, 1, 2, 3, 4], [4, 5, 6, 7, 0]]] * 3, 8, ReplicaRule.QUOTA)
    still = np.tile(np.arange(8) % 2, (4, 1))
    for journey, moving, sizes in (
        (Journey("standard", replace(twice, replica_rule=ReplicaRule.EVEN)), False, []),
        (Journey("standard", twice), False, [4 * 8] * 3),
        (Journey("migrating", HALVES, moves=still), True, [8, 2 * 16, *[2 * 4 * (8 + 2)] * 3]),
        (Journey("coherent", HALVES), False, [8, 2 * 16, 8, 8, 8]),
    ):
        scene = scene_of(trace, "1x2", profile=profile, moving=moving, passes=passes)
        scene = replace(scene, costs=replace(known(scene.costs), gather=[gathered]))
        seconds, expected = priced(scene, journey), sum(sizes)
        assert seconds.get("counts_s", np.zeros(2)) == pytest.approx([expected] * 2)
        parts = ["moe_s"] if passes else ["dispatch_s", "experts_s", "combine_s"]
        parts += ["kv_s", "home_s"] * (journey.dispatch_model == "coherent")
        assert seconds["step_s"] == pytest.approx(
            sum(seconds[name] for name in (*parts, "attention_s")) + expected, rel=0.001
        )


def test_the_way_home_is_an_agreement_and_an_exchange_of_what_is_elsewhere(make_trace: Any) -> None:
    """Of a round trip that takes the bytes of its ports and of its devices apart, on a link that two devices share."""
    trace = make_trace(samples=8)
    scene = scene_of(trace, Cluster.parse("2x2", ("intra=1:5", "inter=1:5:2")))

    def half_trip(port: Any, most: Any, _even: Any) -> Prediction:
        seconds = port + 1000 * most
        return Prediction(seconds, seconds, seconds, port < 0)

    costs = replace(known(scene.costs), exchange=[half_trip] * 2, onward=None, agreements=[(6.0, 9.0), (8.0, 10.0)])
    journey = Journey("coherent", Placement.from_sets([[[0, 1], [2, 3], [4, 5], [6, 7]]] * 3, 8))
    seconds = priced(replace(scene, costs=costs), journey)["home_s"]
    start, end = np.repeat(np.arange(8) % 4, 10), tokens(trace)[:, 2, 0] // 2
    for step in (0, 1):
        at, to = (of[np.repeat(np.arange(8) // 4, 10) == step] for of in (end, start))
        moved = np.zeros((4, 4), int)
        np.add.at(moved, (at, to), 1)
        kept, node = np.diag(moved).copy(), np.arange(4) // 2
        np.fill_diagonal(moved, 0)
        taken = []
        for far in (False, True):
            of_class = moved * ((node[:, None] != node) == far)
            ports = np.stack([of_class.sum(1), of_class.sum(0)])
            handled, busiest = (ports + kept * (not far)).max(), ports.max()
            if far:
                handled, busiest = handled - ports.max(), max(ports.max() / 2, ports.reshape(2, 2, 2).mean(2).max())
                handled += busiest
            taken.append(128 * (busiest + 1000 * handled))
        assert seconds[step] == pytest.approx(max(taken) + 8 / 2)


@pytest.mark.parametrize("shares", [None, [0.5, 0.25, 0.25]], ids=["equal", "unequal"])
def test_a_layer_in_chunks_is_not_exchanged_faster_than_whole(make_trace: Any, shares: Any) -> None:
    """By a curve that grows as the square of bytes a third would take a ninth, were the link not as busy."""
    scene = scene_of(make_trace(samples=8), Cluster.parse("1x2", ("intra=1:5",)), passes=Passes(2.0, full_duplex=False))

    def squared(port: Any, *_: Any) -> Prediction:
        return Prediction(port**2, 0.5 * port**2, 2 * port**2, port < 0)

    def nothing(pairs: Any, _slots: Any) -> Prediction:
        return Prediction(0 * pairs, 0 * pairs, 0 * pairs, pairs < 0)

    scene = replace(scene, costs=replace(known(scene.costs), exchange=[squared], experts=nothing))
    cut = Cut.equal(3, 3) if shares is None else Cut.of([shares] * 3)
    whole, chunks = (priced(scene, Journey("standard", HALVES, cuts=cuts)) for cuts in (None, Cuts(cut, cut)))
    for name in ("dispatch_s", "combine_s"):
        np.testing.assert_allclose(chunks[name], whole[name], rtol=1e-9)


def attention(tokens: int, contexts: int) -> float:
    """c0 + c1 n + c2 c of the case's multiply-adds, 4 n M^2 + (c + n) M."""
    return 10e-6 + 1e-10 * (4 * tokens * 64 * 64 + (contexts + tokens) * 64) if tokens else 0.0


@pytest.mark.parametrize("passes", [None, Passes(2.0, full_duplex=False)], ids=["whole", "chunks"])
def test_fp8_rows_take_the_exchange_of_a_byte_for_each_element_and_four(make_trace: Any, passes: Any) -> None:
    """Links alone, of known latency: what is left of an exchange's seconds without it is the bytes' share."""
    trace = make_trace(samples=8)
    scene = scene_of(trace, Cluster.parse("1x2", ("intra=1:5",)), passes=passes)
    size, width = known(trace.model.hidden_size), known(trace.model.dtype_bytes)
    assert scene.costs is not None
    scene = replace(
        scene,
        costs=replace(scene.costs, experts=lambda pairs, _: Prediction(0 * pairs, 0 * pairs, 0 * pairs, pairs < 0)),
    )
    exact, fp8 = (priced(scene, Journey("standard", HALVES, wire=wire)) for wire in (None, "fp8"))
    for name in ("dispatch_s", "combine_s"):
        crossing = [one[name] - 3 * 5e-6 for one in (exact, fp8)]
        np.testing.assert_allclose(crossing[1], crossing[0] * (size + 4) / (size * width), rtol=1e-9)
    assert (fp8["step_s"] < exact["step_s"]).all()


def a_row_a_second(scene: Scene) -> Scene:
    """The scene in which rows take 1 s each to encode and decode, and experts no time."""
    encoding = lambda rows: Prediction(rows, rows, rows, rows < 0)  # noqa: E731
    experts = lambda pairs, _slots: Prediction(0 * pairs, 0 * pairs, 0 * pairs, pairs < 0)  # noqa: E731
    return replace(scene, costs=replace(known(scene.costs), experts=experts, encoding=encoding))


def rows_of(ids: Any, num_devices: int) -> Any:
    """Rows of the busiest device in each step and layer, half encoded and half decoded, of 8 samples of 10 tokens."""
    home_T, step_T = np.repeat(np.arange(8) % num_devices, 10), np.repeat(np.arange(8) // 4, 10)
    rows_BL = np.zeros((2, 3))
    for step, layer in np.ndindex(2, 3):
        rows = Counter[int]()
        for ids_K, home in zip(ids[step_T == step, layer], home_T[step_T == step], strict=True):
            for device in {int(expert) * num_devices // 8 for expert in ids_K}:
                rows[int(home)] += 1  # encoded
                rows[device] += 1  # decoded
        rows_BL[step, layer] = max(rows.values()) / 2
    return rows_BL


@pytest.mark.parametrize("passes", [None, Passes(0.0, full_duplex=False), Passes(2.0, full_duplex=True)])
def test_rows_of_a_wire_take_the_seconds_of_encoding_and_decoding_them(make_trace: Any, passes: Any) -> None:
    """1 s a row, and nothing else: of the busiest device the mean of rows sent and received, its own among them."""
    trace = make_trace(samples=8)
    scene = a_row_a_second(scene_of(trace, Cluster.parse("1x2", ("intra=1e6:0",)), passes=passes))
    exact, fp8 = (priced(scene, Journey("standard", HALVES, wire=wire)) for wire in (None, "fp8"))
    expected = rows_of(tokens(trace), 2).sum(axis=1)
    for name in ("dispatch_s", "combine_s"):
        np.testing.assert_allclose(exact[name], 0, atol=1e-6)
        np.testing.assert_allclose(fp8[name], expected, atol=1e-6)
    exchanges = 2 if passes is None or not passes.backward else 4
    if passes is None or not passes.full_duplex:
        np.testing.assert_allclose(fp8["step_s"] - exact["step_s"], exchanges * expected, atol=1e-6)


SHARES = ((0.25, 0.75), (0.6, 0.1, 0.3), (1.0,))


@pytest.mark.parametrize("cluster", ["1x2", "2x2"])
def test_every_chunk_encodes_and_decodes_its_part_of_the_rows_rounded_up(make_trace: Any, cluster: str) -> None:
    """Three equal chunks, then those of other shares in every layer."""
    trace, passes = make_trace(samples=8), Passes(2.0, full_duplex=False)
    links = ("intra=1e6:0", "inter=1e6:0")[: 1 + (cluster == "2x2")]
    scene = a_row_a_second(scene_of(trace, Cluster.parse(cluster, links), passes=passes))
    size = scene.cluster.num_devices
    placement = Placement.from_sets([np.arange(8).reshape(size, -1).tolist()] * 3, 8)
    for cut, shares in ((Cut.equal(3, 3), [(1 / 3,) * 3] * 3), (Cut.of(SHARES), SHARES)):
        fp8 = priced(scene, Journey("standard", placement, wire="fp8", cuts=Cuts(cut, cut)))
        expected = np.zeros(2)
        for step, layer in np.ndindex(2, 3):
            rows = rows_of(tokens(trace), size)[step, layer]
            expected[step] += sum(int(np.ceil(share * rows - 1e-9)) if share < 1 else rows for share in shares[layer])
        for name in ("dispatch_s", "combine_s"):
            np.testing.assert_allclose(fp8[name], expected, atol=1e-6)
        np.testing.assert_allclose(fp8["moe_s"], fp8["dispatch_s"] + fp8["combine_s"], atol=1e-6)
        np.testing.assert_allclose(fp8["moe_backward_s"], fp8["moe_s"], atol=1e-6)


@pytest.mark.parametrize("degree", [1, 4])
def test_under_a_fixed_capacity_every_row_of_the_buffers_is_encoded_whatever_is_routed(
    make_trace: Any, degree: int
) -> None:
    """Of 2 x 10 tokens a device and 8 experts: 2 int(1.3 ceil(20 / 8)) rows from a device, padded to whole pieces."""
    passes, cut = Passes(2.0, full_duplex=False), Cut.equal(degree, 3)
    scene = a_row_a_second(scene_of(make_trace(samples=8), Cluster.parse("1x2", ("intra=1e6:0",)), passes=passes))
    journey = Journey("standard", HALVES, wire="fp8", cuts=Cuts(cut, cut), capacity_factor=1.3)
    padded = {1: 6, 4: 8}[degree]
    fp8, exact = (priced(scene, one) for one in (journey, replace(journey, wire=None)))
    for name in ("dispatch_s", "combine_s"):
        np.testing.assert_allclose(fp8[name] - exact[name], [3 * 8 * padded] * 2, atol=1e-6)


def test_under_a_fixed_capacity_what_devices_keep_counts_inside_the_node_alone(make_trace: Any) -> None:
    links = Cluster.parse("2x2", ("intra=1:0", "inter=1:0"))
    scene = a_row_a_second(scene_of(make_trace(samples=8), links, passes=Passes(0.0, full_duplex=False)))
    spread, cut = Placement.from_sets([[[0, 1], [2, 3], [4, 5], [6, 7]]] * 3, 8), Cut.equal(1, 3)
    journey, found = Journey("standard", spread, cuts=Cuts(cut, None), capacity_factor=1.3), []
    for place in (0, 1):  # over bytes of the port, or of the device

        def curve(*sizes: Any, place: int = place) -> Prediction:
            return Prediction(*(1e-9 * sizes[place],) * 3, sizes[0] < 0)

        costs = replace(known(scene.costs), exchange=[curve] * 2, onward=None, agreements=None)
        found.append(priced(replace(scene, costs=costs), journey))
    by_port, by_device = found
    np.testing.assert_allclose(by_device["dispatch_inter_s"], by_port["dispatch_inter_s"])
    np.testing.assert_allclose(by_device["dispatch_intra_s"], 2 * by_port["dispatch_intra_s"])


@pytest.mark.parametrize("passes", [None, Passes(0.0, full_duplex=False)], ids=["whole", "chunks"])
def test_links_that_nothing_crosses_take_no_time_where_rows_are_encoded(make_trace: Any, passes: Any) -> None:
    """Every expert on every node and tokens that take the nearest; then every expert on every device."""
    near = replace(Placement.from_sets([[[0, 1, 2, 3], [4, 5, 6, 7]] * 2] * 3, 8), replica_rule=ReplicaRule.NEAREST)
    here = replace(Placement.from_sets([[[*range(8)]] * 4] * 3, 8), replica_rule=ReplicaRule.NEAREST)
    links = Cluster.parse("2x2", ("intra=1:0", "inter=1:0"))
    scene = a_row_a_second(scene_of(make_trace(samples=8), links, passes=passes))
    for placement in (near, here):
        fp8 = priced(scene, Journey("standard", placement, wire="fp8"))
        for part in ("dispatch", "combine"):
            assert not fp8[f"{part}_inter_s"].any()
            assert (fp8[f"{part}_s"] >= 3 * 10).all()
            np.testing.assert_array_equal(fp8[f"{part}_intra_s"], fp8[f"{part}_s"])
    far = priced(scene, Journey("standard", Placement.from_sets([[[0, 1], [2, 3], [4, 5], [6, 7]]] * 3, 8), wire="fp8"))
    assert (far["dispatch_inter_s"] >= 3 * 10).all()


@pytest.mark.parametrize("shared_by", [1.0, 1.5, 2.0])
def test_chunks_between_nodes_that_share_a_link_are_parts_of_their_busiest_port(
    make_trace: Any, shared_by: float
) -> None:
    """Copies walked one by one; 1 ns a byte of a device beside the other of its node, 128 bytes a copy."""
    trace, passes = make_trace(samples=8), Passes(0.0, full_duplex=False)
    scene = scene_of(trace, Cluster.parse("2x2", ("intra=1e6:0", f"inter=1:0:{shared_by}")), passes=passes)
    scene = a_row_a_second(scene)
    placement = Placement.from_sets([[[0, 1], [2, 3], [4, 5], [6, 7]]] * 3, 8)
    for cut, shares in ((Cut.equal(3, 3), [(1 / 3,) * 3] * 3), (Cut.of(SHARES), SHARES)):
        expected = np.zeros(2)
        for step, layer in np.ndindex(2, 3):
            sent, received = Counter[int](), Counter[int]()
            for token in range(40 * step, 40 * step + 40):
                home = token // 10 % 4
                for device in {int(expert) // 2 for expert in tokens(trace)[token, layer]}:
                    sent[home] += device // 2 != home // 2
                    received[device] += device // 2 != home // 2
            port = 0.0
            for way in (sent, received):
                port = max(port, *(way[d] / shared_by for d in range(4)), *((way[d] + way[d + 1]) / 2 for d in (0, 2)))
            expected[step] += sum(np.ceil(share * port - 1e-9) if share < 1 else port for share in shares[layer])
        found = priced(scene, Journey("standard", placement, cuts=Cuts(cut, cut)))
        for name in ("dispatch_inter_s", "combine_inter_s", "dispatch_s"):
            np.testing.assert_allclose(found[name], 128e-9 * expected, rtol=0.001 if name == "dispatch_s" else 1e-9)


def test_coherent_top_1_combines_for_nothing(make_trace: Any, make_profile: Any) -> None:
    scene = scene_of(make_trace(samples=8, top_k=1), "1x2", profile=make_profile("1x2"))
    parts = priced(scene, Journey("coherent", HALVES))
    assert not parts["combine_s"].any()
    assert parts["dispatch_s"].all()
    assert scene.costs is not None
    stretched = replace(scene.costs, exchange=[lambda port, *_: Prediction(port, port, port, port >= 0)])
    for passes in (None, Passes(0.0, full_duplex=False)):  # whole layers, then chunks
        timed, journey = replace(scene, costs=stretched, passes=passes), Journey("coherent", HALVES)
        ((tally,),) = replay(timed, [journey], ports=True)
        assert price(tally, journey, timed).extrapolated.keys() & {"dispatch_s", "combine_s"} == {"dispatch_s"}


def test_a_noisier_profile_gives_wider_intervals(make_trace: Any, make_profile: Any) -> None:
    trace, widths = make_trace(samples=120), []
    for noise in (0.02, 0.4):
        step = planned(trace, profile=make_profile(noise=noise)).evaluation.judging.contenders[0].metrics["step_s"]
        widths.append((step.high - step.low) / step.value)
    assert widths[1] > 2 * widths[0] > 0


def test_links_alone_time_the_exchanges_but_no_step_and_copies_decide(make_trace: Any) -> None:
    plan = planned(make_trace(samples=120), "exflow", "2x2", ("intra=100:2", "inter=10:9"))
    assert plan.verdict.metric == "device_copies"
    metrics, seconds = judged(plan)["plan/coherent"], plan.options["seconds"]
    assert metrics.keys() & {"exchange_s", "kv_inter_s", "step_s"} == {"exchange_s", "kv_inter_s"}
    assert metrics["dispatch_inter_s"] >= 3 * 9e-6
    assert seconds["sources"]["dispatch inter"] == "link inter"
    assert seconds["missing"]["experts"] == "no profile"


@pytest.mark.parametrize(
    ("dispatch", "cases", "metric"),
    [
        ("coherent", ("all_to_all", "all_gather"), "device_copies"),
        ("coherent", UNATTENDED, "step_s"),
        ("coherent", (*UNATTENDED, "attention"), "step_s"),
        ("standard", UNATTENDED, "step_s"),
    ],
)
def test_a_step_judges_with_and_without_attention_but_not_without_experts(
    make_trace: Any, make_profile: Any, dispatch: Any, cases: Any, metric: str
) -> None:
    plan = planned(make_trace(samples=40), profile=make_profile(cases=cases), dispatch_model=dispatch)
    assert plan.verdict.metric == metric
    ours, theirs = (judged(plan)[label] for label in (f"plan/{dispatch}", "contiguous/standard"))
    assert plan.verdict.gain.value == pytest.approx(theirs[metric] - ours[metric])
    needed = {"attention": "attention", "experts": "expert_ffn"}
    missing = {
        part: f"the profile has no {case}; join it with one that has, by moeplan profile --merge"
        for part, case in needed.items()
        if case not in cases
    }
    assert plan.options["seconds"]["missing"] == missing
    names = ("dispatch_s", "kv_s", "counts_s", "experts_s", "combine_s", "home_s", "attention_s")
    parts = [ours[name] for name in names if name in ours]
    assert ("step_s" in ours) == ("experts" not in missing)
    assert ours.get("step_s", sum(parts)) == pytest.approx(sum(parts))
    assert ("attention_s" in ours) == ("attention" not in missing)


@pytest.mark.parametrize(
    ("sizes", "source", "other_dtype"),
    [
        ({"attention": Attention(kv_size=128), "dtype_bytes": 4}, "attention/fp32", ()),
        ({"attention": Attention(kv_size=16)}, "attention/fp32 (as MHA)", ("experts", "attention")),
    ],
)
def test_attention_of_fewer_keys_and_parts_in_another_dtype_are_named(
    make_trace: Any, make_profile: Any, sizes: Any, source: str, other_dtype: Any
) -> None:
    spec = replace(make_trace().model, **sizes)
    costs = known(CostModel.of(load(make_profile()), Cluster.parse("1x4"), spec, samples=True))
    assert (costs.sources["attention"], costs.other_dtype) == (source, other_dtype)


def attending(*seconds: tuple[str, float]) -> Profile:
    """A profile of cases of attention that take so long whatever the size."""
    sizes = [{"batch": batch, "length": length, "hidden": 8, "calls": 1} for batch in (1, 16) for length in (16, 64)]
    timed = [series(case, dtype="fp32", sizes=sizes, a_s=taken_s, b_s=0.0) for case, taken_s in seconds]
    return measured_profile(Cluster(1, 4), *timed)


def test_samples_that_move_attend_as_the_runtime_does_where_that_was_measured_and_others_as_fused() -> None:
    fused, runtime = ("attention", 1e-3), ("attended", 3e-3)
    at, once = np.array([4.0]), np.ones(1)
    for profile, moving, expected_s, source in (
        (attending(fused, runtime), True, 3e-3, "attended/fp32 (as MHA)"),
        (attending(fused), True, 1e-3, "attention/fp32 (as MHA) (fused)"),
        (attending(fused, runtime), False, 1e-3, None),
    ):
        costs = known(CostModel.of(profile, profile.cluster, IN_FLOATS, samples=True, moving=moving))
        assert costs.sources.get(MOVED) == source
        assert costs.sources["attention"] == "attention/fp32 (as MHA)"
        for dispatch_model, taken_s in (("standard", 1e-3), ("coherent", 1e-3), ("migrating", expected_s)):
            curve = known(costs.attention_of(dispatch_model))  # type: ignore[arg-type]
            assert curve(at, 8 * at, once).seconds == pytest.approx(taken_s)
    alone = attending(runtime)
    costs = known(CostModel.of(alone, alone.cluster, IN_FLOATS, samples=True, moving=True))
    assert costs.missing["attention"] == "the profile has no attention; join it with one that has, by " + MERGE
    assert costs.attention_of("migrating") is None


CALLS = tuple(itertools.product((1, 4, 16), (16, 64, 256), (1, 16)))


@pytest.mark.parametrize(
    ("fitted", "expected_s"),
    [
        (AttentionLaw(start_s=5e-5, call_s=2e-5, projection_s=1e-13, score_s=1e-13), 2e-5),
        (AttentionLaw(start_s=5e-5, projection_s=1e-13, score_s=1e-13), 5e-5),  # calls were not told apart
        ("surface", 2e-5),
        ("line", 5e-5),
    ],
    ids=["law", "earlier law", "surface", "line"],
)
def test_a_call_after_the_first_takes_what_the_profile_says_of_calls(
    make_trace: Any, fitted: Any, expected_s: float
) -> None:
    spec, cluster = replace(make_trace().model, hidden_size=64), Cluster(1, 4)
    sizes = [dict(zip(("batch", "length", "calls"), one, strict=True)) for one in CALLS if one[0] >= one[2]]
    if fitted == "surface":
        law = AttentionLaw(start_s=5e-5, call_s=2e-5, projection_s=1e-13, score_s=1e-13)
        columns = np.array([[size[axis] for axis in ("length", "batch", "calls")] for size in sizes], float)
        seconds = law.seconds(columns[:, 1], columns[:, 0], np.full(len(columns), 64.0), columns[:, 2])
        fitted = Surface.of(("length", "batch", "calls"), columns, seconds)
    elif fitted == "line":
        fitted = AlphaBeta(a_s=5e-5, b_s=1e-30)
    axes = (*SEQUENCES, *(["calls"] if "calls" in fitted.axes else []))
    measured = {axis: (64, 64) if axis == "hidden" else (1, 256) for axis in axes}
    measured |= {"length": (16, 256), "batch": (1, 16)} | {axis: (1, 16) for axis in axes if axis == "calls"}
    line = AlphaBeta(a_s=0.0, b_s=1e-12)
    fit = Fit(axes=axes, model=fitted, alpha_beta=line, held_out={}, measured=measured, low_factor=0.5, high_factor=2.0)
    timed = Series(case="attention", dtype="fp32", ranks=1, unit="macs", fit=fit)
    profile = describe("1x4").model_copy(update={"series": {timed.key: timed}})
    curve = known(known(CostModel.of(profile, cluster, spec, samples=True)).attention)
    batch, length = np.array([1.0, 3.7, 16.0]), np.array([16.0, 40.0, 200.0])
    once, divided = curve(batch, length, np.ones(3)), curve(batch, length, np.array([1.0, 2.0, 9.0]))
    np.testing.assert_allclose(divided.seconds - once.seconds, [0, expected_s, 8 * expected_s], rtol=1e-4)
    np.testing.assert_allclose(divided.low - once.low, [0, expected_s / 2, 4 * expected_s], rtol=1e-4)
    np.testing.assert_allclose(divided.high - once.high, [0, 2 * expected_s, 16 * expected_s], rtol=1e-4)


GPT_OSS: dict[str, Any] = {
    "hidden_size": 2880,
    "ffn_size": 2880,
    "dtype_bytes": 2,
    "attention": Attention(kv_size=1024),
}


@pytest.mark.parametrize(("cluster", "links"), [("1x8", ()), ("2x8", ("inter=50:5",)), ("4x8", ("inter=50:5",))])
def test_a_preset_times_every_part_and_its_attention_is_said_to_be_a_roofline(
    make_trace: Any, tmp_path: Path, cluster: str, links: Any
) -> None:
    profile = on_cluster(load_preset("h200_sxm"), cluster, links)
    save(profile, tmp_path / "h200.json")
    trace = sized(make_trace(samples=64, experts=32, top_k=4), tmp_path / "sized", **GPT_OSS)
    plan = planned(trace, cluster=profile.cluster, profile=tmp_path / "h200.json")
    seconds = plan.options["seconds"]
    assert not seconds["missing"]
    assert seconds["sources"]["attention"] == "attention/bf16 (roofline, not measured)"
    assert seconds["sources"]["experts"] == "expert_ffn/bf16"
    assert seconds["sources"]["dispatch intra"] == "all_to_all/uint8@8/intra"
    assert ("dispatch inter" in seconds["sources"]) == bool(links)
    parts = judged(plan)["contiguous/standard"]
    assert parts["step_s"] == pytest.approx(
        sum(parts[name] for name in ("attention_s", "dispatch_s", "experts_s", "combine_s"))
    )
    read_s = 3 * 2880**2 * 2 / 4.8e12  # an expert's weights; every device has one that is asked for
    assert 3 * read_s < parts["experts_s"] < 3 * 2e-4
    assert 0 < parts["attention_s"] < parts["step_s"] / 2


def test_a_roofline_takes_the_models_keys_and_values_and_tokens_of_a_step(make_trace: Any) -> None:
    def attention(kv_size: int, queries: float, dtype_bytes: int = 2) -> tuple[str, float]:
        sizes = GPT_OSS | {"attention": Attention(kv_size=kv_size), "dtype_bytes": dtype_bytes}
        spec = replace(make_trace().model, **sizes)
        profile = load_preset("h100_sxm")
        costs = known(CostModel.of(profile, Cluster(1, 8), spec, samples=True, queries=queries))
        curve = known(costs.attention)
        prediction = curve(np.array([64 / 4001]), np.array([4001.0]), np.ones(1))  # 64 tokens, each after 2,000
        assert not prediction.extrapolated.any()
        return costs.sources["attention"], float(prediction.seconds[0])

    source, decoded_s = attention(1024, queries=1)
    assert source == "attention/bf16 (roofline, not measured)"
    assert attention(5760, queries=1)[1] - decoded_s == pytest.approx(
        2 * (5760 - 1024) * (2880 + 64 + 64 * 2001) / (0.8 * 3.35e12)
    )
    assert attention(1024, queries=64)[1] < decoded_s / 2
    source, eight_bits_s = attention(1024, queries=1, dtype_bytes=1)
    assert source == "attention/fp8 (roofline, not measured)"
    assert eight_bits_s == pytest.approx(decoded_s / 2)


MLA = Attention(
    kv_size=576,
    num_heads=128,
    latent=Latent(kv_rank=512, q_rank=1536, head_size=128, rope_size=64, value_size=128),
)


@pytest.mark.parametrize("decode", [True, False])
def test_a_roofline_prices_latent_attention_by_its_projections_of_low_rank(make_trace: Any, decode: bool) -> None:
    spec = replace(make_trace().model, hidden_size=7168, ffn_size=2048, dtype_bytes=2, attention=MLA)
    profile, hidden, heads = load_preset("h100_sxm"), 7168, 128
    queries = 1.0 if decode else 2.0**30
    curve = known(known(CostModel.of(profile, Cluster(1, 8), spec, samples=True, queries=queries)).attention)
    tokens, length = 4096.0, 4096.0
    seconds = curve(np.array([tokens / length]), np.array([length]), np.ones(1)).seconds[0]
    law: Any = known(known(profile.series["attention/bf16"]).fit).model
    weights = sum(
        rows * columns
        for rows, columns in (
            (hidden, 1536),  # q down
            (1536, heads * (128 + 64)),  # q up
            (hidden, 512 + 64),  # kv down
            (512, heads * (128 + 128)),  # kv up
            (heads * 128, hidden),  # o
        )
    )
    each = heads * (512 + 64 + 512) if decode else heads * (128 + 64 + 128)  # with a token of the context
    macs = tokens * weights + tokens * (length + 1) / 2 * each
    assert seconds == pytest.approx(2 * macs / (law.compute_share * law.flops))
    full = known(known(CostModel.of(profile, Cluster(1, 8), spec, samples=True, queries=1.0)).attention)
    few = full(np.array([1.0]), np.array([1.0]), np.ones(1)).seconds[0]  # reads the weights
    assert few == pytest.approx(2 * (weights + 2 * hidden + 576 * 2) / (law.memory_share * law.bytes_per_s), rel=1e-6)


def test_tokens_of_a_sample_in_a_step_are_counted_by_recorded_steps(make_trace: Any, tmp_path: Path) -> None:
    whole = make_trace(samples=6, tokens=12)
    torn = in_several_steps(whole, tmp_path / "torn")
    assert [index.queries for index in (index_units(whole), index_samples(whole))] == [12, 12]
    assert [index.queries for index in (index_units(torn), index_samples(torn))] == [3, 3]


def test_a_part_with_one_of_two_links_is_missing_and_has_no_source(make_trace: Any) -> None:
    costs = known(CostModel.of(None, Cluster.parse("2x2", ["intra=100:2"]), make_trace().model, samples=True))
    assert not costs.sources
    assert "--link inter=" in costs.missing["dispatch"]
    assert costs.exchange is None


def test_what_is_missing_outside_the_measured_sizes_or_by_a_link_is_told(make_trace: Any, make_profile: Any) -> None:
    profile: Path = make_profile("1x4")
    links = Cluster(1, 2, load(profile).cluster.links)  # other devices than measured
    inside, outside, sampleless, linked = (
        planned(make_trace(samples=60, **shape), cluster=cluster, profile=profile).options["seconds"]
        for shape, cluster in (
            ({"tokens": 30}, None),
            ({"tokens": 400}, None),
            ({"columns": ("step",)}, None),
            ({}, links),
        )
    )
    assert outside["extrapolated"]["experts_s"] == 1.0 > inside["extrapolated"].get("experts_s", 0.0)
    assert "samples" in sampleless["missing"]["attention"]
    assert linked["sources"]["dispatch intra"] == "link intra"


@pytest.mark.parametrize("dispatch_model", ["standard", "coherent"])
def test_exchanges_are_timed_by_what_devices_keep_and_as_tokens_move_in_chunks_as_in_whole_layers(
    make_trace: Any, make_profile: Any, dispatch_model: Any
) -> None:
    scene = scene_of(make_trace(samples=8), "1x2", profile=make_profile("1x2"))

    def curve(factor: float) -> Any:
        return lambda _port, most, _even: Prediction(*(factor * most,) * 3, most < 0)

    costs = replace(known(scene.costs), exchange=[curve(1.0)], onward=[curve(2.0)])
    journey = Journey(dispatch_model, HALVES)
    for passes in (None, Passes(0.0, full_duplex=False)):
        timed = replace(scene, costs=costs, passes=passes)
        ((tally,),) = replay(timed, [journey], ports=True)
        ports = known(tally.ports)
        most = (ports.dispatch[:, :, 0] + ports.kept[:, :, :1]).max(axis=(2, 3)).sum(axis=1)
        factor = known(scene.model.copy_bytes) * (1.0 if dispatch_model == "standard" else 2.0)
        assert price(tally, journey, timed).levels["dispatch_s"][1] == pytest.approx(factor * most)


def of_runtime(noisy: bool = False) -> Profile:
    """A profile with the runtime's own cases beside the others; those take ten times as long."""
    block = [{"tokens": t, "experts": e, "hidden": 8, "ffn": 8} for t in (8, 64, 512) for e in (1, 4)]
    ffn = [one | {"grouped": 0} for one in block]
    trips = [{"bytes": 2**power, **way} for power in (10, 14, 18) for way in ways(4)]
    return measured_profile(
        Cluster(1, 4),
        series("expert_ffn", dtype="fp32", sizes=ffn, a_s=1e-3),
        series("routed_block", dtype="fp32", sizes=block),
        series("all_to_all", 4, "intra", a_s=1e-3),
        series("routed_exchange", 4, "intra", sizes=trips),
        noise=Noise(sizes=10, wide=9 if noisy else 0),
    )


def test_what_the_runtime_runs_times_experts_and_exchanges_where_it_was_measured(make_trace: Any) -> None:
    spec = replace(make_trace().model, hidden_size=8, ffn_size=8, dtype_bytes=4)
    profile = of_runtime()
    costs = known(CostModel.of(profile, profile.cluster, spec, samples=False))
    assert costs.sources["experts"] == "routed_block/fp32"
    assert costs.sources["dispatch intra"] == "routed_exchange/uint8@4/intra"
    for curves, kept in ((costs.exchange, 25), (costs.onward, 62)):  # a call is a dispatch and a combine
        port = 2.0**14 * (100 - kept) / 100
        half = known(curves)[0](np.array([port]), np.array([2.0**14]), np.ones(1))
        assert half.seconds == pytest.approx((1e-5 + 1e-9 * 2 * port) / 2, rel=1e-3)
        assert not half.extrapolated
    assert known(costs.experts)(np.array([64.0]), np.array([4.0])).seconds == pytest.approx(1e-5 + 1e-9 * 3 * 64 * 64)
    others = profile.model_copy(
        update={"series": {key: one for key, one in profile.series.items() if "routed" not in key}}
    )
    fallback = known(CostModel.of(others, profile.cluster, spec, samples=False))
    assert fallback.sources["experts"] == "expert_ffn/fp32"
    assert fallback.sources["dispatch intra"] == "all_to_all/uint8@4/intra"


def test_counts_are_agreed_once_before_all_chunks_and_known_to_the_backward_pass(make_trace: Any) -> None:
    """An agreement takes 3 us of a round trip's 10; where tokens move on, a second one does."""
    trips = [{"bytes": 2**power, **way} for power in (10, 14, 18) for way in ways(4)]
    block = [{"tokens": t, "experts": e, "hidden": 8, "ffn": 8} for t in (8, 64, 512) for e in (1, 2)]
    profile = measured_profile(
        Cluster(1, 4),
        series("routed_block", dtype="fp32", sizes=block),
        series("all_to_all", 4, "intra", sizes=[{"bytes": 2**power} for power in (4, 9, 12)], a_s=3e-6, b_s=0.0),
        series("routed_exchange", 4, "intra", sizes=trips, a_s=10e-6),
    )
    scene = scene_of(make_trace(samples=8), "1x4")
    spec = replace(scene.model, dtype_bytes=4)
    costs = known(CostModel.of(profile, profile.cluster, spec, samples=True))
    assert costs.agreements_of("standard") == pytest.approx([3e-6])
    assert costs.agreements_of("coherent") == costs.agreements_of("migrating") == pytest.approx([6e-6])
    journey = Journey("standard", Placement.from_sets([[[0, 1], [2, 3], [4, 5], [6, 7]]] * 3, 8))
    whole = priced(replace(scene, model=spec, costs=costs), journey)
    timed = replace(scene, model=spec, costs=costs, passes=Passes(2.0, full_duplex=False))
    one = priced(timed, journey)
    np.testing.assert_allclose(one["moe_s"], whole["dispatch_s"] + whole["experts_s"] + whole["combine_s"])
    np.testing.assert_allclose(one["moe_backward_s"], one["moe_s"] + whole["experts_s"] - 3 * 3e-6)
    cut = Cut.equal(2, 3)
    two = priced(timed, replace(journey, cuts=Cuts(cut, cut)))
    ((tally,),) = replay(timed, [journey], ports=True)
    decided_by = Pipeline(tally, timed, known(timed.passes), "standard").both(Cuts(cut, cut))
    assert decided_by.sum() == pytest.approx((two["moe_s"] + two["moe_backward_s"]).mean())
    alone = priced(replace(timed, costs=replace(costs, agreements=None)), replace(journey, cuts=Cuts(cut, cut)))
    busy, more = (parts["dispatch_s"] + parts["combine_s"] for parts in (two, alone))
    np.testing.assert_allclose(busy, more - 3 * 3e-6)  # a layer, one of its two agreements


def test_parts_timed_on_a_noisy_machine_are_named(make_trace: Any) -> None:
    spec = replace(make_trace().model, hidden_size=8, ffn_size=8, dtype_bytes=4)
    for noisy, parts in ((False, ()), (True, ("dispatch", "experts"))):
        profile = of_runtime(noisy)
        assert known(CostModel.of(profile, profile.cluster, spec, samples=False)).noisy == parts


@pytest.mark.parametrize(("dtype", "other"), [("fp32", ()), ("bf16", ("encoding",))])
@pytest.mark.parametrize("noisy", [False, True])
def test_encoding_of_fp8_rows_is_a_part_with_a_source_a_dtype_and_noise(dtype: str, other: Any, noisy: bool) -> None:
    rows = [{"rows": rows, "hidden": hidden} for rows in (8, 64, 512) for hidden in (8, 64)]
    measured = series("fp8_rows", dtype=dtype, sizes=rows), series("all_to_all", 4, "intra")
    profile = measured_profile(Cluster(1, 4), *measured, noise=Noise(sizes=10, wide=9 if noisy else 0))
    costs = known(CostModel.of(profile, profile.cluster, IN_FLOATS, samples=False))
    assert costs.sources["encoding"] == f"fp8_rows/{dtype}"
    assert costs.other_dtype == other
    assert ("encoding" in costs.noisy) == noisy
    assert known(costs.encoding)(np.array([100.0])).seconds == pytest.approx(1e-5 + 1e-9 * 100 * (8 + 4))
    older = profile.model_copy(update={"series": {measured[1].key: measured[1]}})
    costs = known(CostModel.of(older, profile.cluster, IN_FLOATS, samples=False))
    assert costs.encoding is None
    assert costs.missing["encoding"] == "the profile has no fp8_rows; measure again: moeplan profile"
    untimed = known(CostModel.of(profile, profile.cluster, IN_FLOATS, samples=False, by_loads=True))
    assert "encoding" not in {*untimed.sources, *untimed.missing, *untimed.noisy}


@pytest.mark.parametrize(("dtype", "other"), [("fp32", ()), ("bf16", ("folding",))])
@pytest.mark.parametrize("noisy", [False, True])
def test_folding_of_rows_is_a_part_with_a_source_a_dtype_and_noise(dtype: str, other: Any, noisy: bool) -> None:
    axes = {"rows": (8, 64, 512), "group": (4, 32), "hidden": (8, 64), "backward": (0, 1)}
    sizes = [dict(zip(axes, one, strict=True)) for one in itertools.product(*axes.values())]
    measured = series("condensed_rows", dtype=dtype, sizes=sizes, a_s=0.0), series("all_to_all", 4, "intra")
    profile = measured_profile(Cluster(1, 4), *measured, noise=Noise(sizes=10, wide=9 if noisy else 0))
    costs = known(CostModel.of(profile, profile.cluster, IN_FLOATS, samples=False))
    assert costs.sources["folding"] == f"condensed_rows/{dtype}"
    assert costs.other_dtype == other
    assert ("folding" in costs.noisy) == noisy
    rows, group, trains = np.array([[100.0, 8.0], [32.0, 4.0], [1.0, 0.0]])
    assert known(costs.folding)(rows, group, trains).seconds == pytest.approx(1e-9 * rows * group * 8, rel=0.2)
    older = profile.model_copy(update={"series": {measured[1].key: measured[1]}})
    costs = known(CostModel.of(older, profile.cluster, IN_FLOATS, samples=False))
    assert costs.folding is None
    assert costs.missing["folding"] == "the profile has no condensed_rows; measure again: moeplan profile"
    untimed = known(CostModel.of(profile, profile.cluster, IN_FLOATS, samples=False, by_loads=True))
    assert "folding" not in {*untimed.sources, *untimed.missing, *untimed.noisy}


@pytest.mark.parametrize("passes", [None, Passes(0.0, full_duplex=False), Passes(2.0, full_duplex=True)])
def test_folding_takes_what_the_slowest_device_takes_in_every_layer(make_trace: Any, passes: Any) -> None:
    """1 s a row and half a second a row of a group, trained twice that; no chunk overlaps."""
    scene = scene_of(make_trace(samples=8), Cluster.parse("1x2", ("intra=1e6:0",)), passes=passes)
    experts = lambda pairs, _slots: Prediction(0 * pairs, 0 * pairs, 0 * pairs, pairs < 0)  # noqa: E731

    def folding(rows: Any, each: Any, trains: Any) -> Prediction:
        seconds = (1 + trains) * (rows + each / 2)
        return Prediction(seconds, seconds / 2, seconds * 2, rows > 20)

    scene = replace(scene, costs=replace(known(scene.costs), experts=experts, folding=folding))
    journey = Journey("standard", HALVES)
    ((tally,),) = replay(scene, [journey], ports=True)
    rows = np.random.default_rng(0).integers(0, 30, tally.loads.shape)
    pairs = np.random.default_rng(1).integers(1, 5, rows.shape) * rows
    pairs[1, 2] = 0
    folded = price(replace(tally, folded=np.stack([rows, pairs])), journey, scene)
    exact = price(tally, journey, scene)
    assert "folding_s" not in exact.levels
    expected = np.zeros(2)
    for step, layer in np.ndindex(2, 3):
        here = [(1.0 * n + p / n / 2) if p else 0.0 for n, p in zip(rows[step, layer], pairs[step, layer], strict=True)]
        expected[step] += max(here) * (2 if passes is not None and passes.backward else 1)
    np.testing.assert_allclose(folded.levels["folding_s"], expected * [[0.5], [1.0], [2.0]])
    np.testing.assert_allclose(folded.levels["step_s"] - exact.levels["step_s"], expected * [[0.5], [1.0], [2.0]])
    np.testing.assert_allclose(folded.step["folding"], folded.levels["folding_s"])
    assert folded.extrapolated["folding_s"] == pytest.approx(((rows > 20) & (pairs > 0)).any(axis=2).mean())
    even = (rows.mean(axis=2) + pairs.mean(axis=2) / np.maximum(rows.mean(axis=2), 1) / 2) * (pairs.sum(axis=2) > 0)
    ideal = even.sum(axis=1) * (2 if passes is not None and passes.backward else 1)
    np.testing.assert_allclose(folded.levels["ideal_step_s"][1] - exact.levels["ideal_step_s"][1], ideal)


def test_exchanges_between_nodes_of_another_size_are_timed_by_the_link() -> None:
    """Eight ranks on 2 x 4: on 4 x 2 as many ranks, of whose bytes 6 of 7 blocks cross between nodes instead of 4."""
    here = Cluster(2, 4, {"inter": Link(5e-6, 4e-10, 4.0)})
    there = Cluster(4, 2, here.links_on(Cluster(4, 2)))
    inside = [series("all_to_all", ranks, "intra") for ranks in (2, 4)]
    profile = measured_profile(here, series("all_to_all", 8, "inter"), *inside)
    for cluster, source in ((here, "all_to_all/uint8@8/inter"), (there, "link inter")):
        costs = known(CostModel.of(profile, cluster, IN_FLOATS, samples=False))
        assert costs.sources["dispatch inter"] == source
        assert (costs.shared.shared_by, costs.shared.devices_per_node) == (cluster.devices_per_node,) * 2
    port = np.array([1e6])
    assert known(costs.exchange)[1](port, port, port).seconds == pytest.approx(5e-6 + 2e-10 * 1e6)


def of_nodes() -> Profile:
    """A profile of 2x2 whose half trips of the runtime take 1 ms + 1 ns a byte in a node, twice that between two."""
    trips = {ranks: [{"bytes": 2**power, **way} for power in range(10, 19) for way in ways(ranks)] for ranks in (2, 4)}
    return measured_profile(
        Cluster(2, 2),
        series("routed_exchange", 2, "intra", sizes=trips[2], a_s=2e-3),
        series("routed_exchange", 4, "inter", sizes=trips[4], a_s=4e-3, b_s=2e-9),
    )


def test_what_no_token_crosses_costs_nothing_though_devices_keep_much(make_trace: Any) -> None:
    """Every expert on every node, and tokens that take the nearest."""
    near = Placement.from_sets([[[0, 1, 2, 3], [4, 5, 6, 7]] * 2] * 3, 8)
    near = replace(near, replica_rule=ReplicaRule.NEAREST)
    far = Placement.from_sets([[[0, 1], [2, 3], [4, 5], [6, 7]]] * 3, 8)
    profile, scene = of_nodes(), scene_of(make_trace(samples=8), "2x2")
    for passes in (None, Passes(0.0, full_duplex=False)):
        costs = CostModel.of(profile, profile.cluster, replace(scene.model, dtype_bytes=4), samples=True)
        timed = replace(scene, costs=costs, passes=passes)
        parts = priced(timed, Journey("standard", near))
        assert not parts["dispatch_inter_s"].any()
        assert not parts["combine_inter_s"].any()
        assert (parts["dispatch_intra_s"] > 3 * 1e-3).all()
        assert (priced(timed, Journey("standard", far))["dispatch_inter_s"] > 3 * 2e-3).all()


def test_between_nodes_an_exchange_takes_what_an_even_one_takes_that_sends_as_much() -> None:
    """(N - 1) G of P - 1 blocks of a port cross between nodes; what devices keep changes nothing."""
    profile = of_nodes()
    inter = known(known(CostModel.of(profile, profile.cluster, IN_FLOATS, samples=True)).exchange)[1]
    port = np.geomspace(2e3, 1e5, 40)
    half = inter(port, port, np.ones(40))
    np.testing.assert_allclose(half.seconds, 2e-3 + 2e-9 * port * 3 / 2, rtol=0.01)
    assert not half.extrapolated.any()


@pytest.mark.parametrize(("cluster", "shared_by"), [("2x2", 2.0), ("2x2", 1.5), ("4x2", 2.0), ("2x4", 4.0)])
def test_a_profile_of_nodes_that_share_a_link_prices_any_exchange_by_that_link(
    make_trace: Any, cluster: str, shared_by: float
) -> None:
    """Exchanges of which each waits for the busiest link, 1 ns a byte of a device beside all others, as measured."""
    nodes = Cluster.parse(cluster, [f"inter=1:0:{shared_by}", "intra=1e6:0"])
    size, group, case = nodes.num_devices, nodes.devices_per_node, CASES["routed_exchange"]

    def link_s(bytes_DD: Any) -> float:
        """Bytes from device to device, one by one."""
        sent, received = Counter[int](), Counter[int]()
        for start, end in itertools.product(range(size), repeat=2):
            if start // group != end // group:
                sent[start] += bytes_DD[start][end]
                received[end] += bytes_DD[start][end]
        busiest = 0.0
        for way in (sent, received):
            of_node = [sum(way[device] for device in range(at, at + group)) / group for at in range(0, size, group)]
            busiest = max(busiest, *of_node, *(one / shared_by for one in way.values()))
        return 1e-9 * busiest

    taken = []
    for trip in ({"bytes": 2**power, **way} for power in range(12, 23, 2) for way in ways(size)):
        seconds = 2 * link_s((512 * copies_DD(trip["bytes"], trip["kept"], size, even=bool(trip["even"]))).tolist())
        taken.append(Measurement.of(trip, case.work(trip, size), [seconds] * 6))
    one = series("routed_exchange", size, "inter", sizes=[taken[0].size, taken[-1].size])
    one = one.model_copy(update={"measurements": tuple(taken), "fit": fit_series(case, size, taken)})
    profile = measured_profile(nodes, one, series("routed_exchange", group, "intra", sizes=trips_of(group), b_s=1e-15))
    costs = known(CostModel.of(profile, nodes, IN_FLOATS, samples=False))
    rng = np.random.default_rng(0)
    for _ in range(20):
        sent_DD = rng.integers(0, 2000, size=(size, size)) * rng.integers(0, 2, size=(size, 1))
        sent_DD[0, -1] += 500
        node_D = np.arange(size) // group
        far_DD = sent_DD * (node_D[:, None] != node_D)
        ports = np.zeros((1, 1, 2, 2, size), np.int64)
        ports[0, 0, 1] = far_DD.sum(1), far_DD.sum(0)
        predicted = exchange_seconds(ports, 32.0, known(costs.exchange), shared=costs.shared)[1]
        assert predicted.seconds[0, 0] == pytest.approx(link_s((32 * far_DD).tolist()), rel=0.06)


def test_a_profile_interrupted_before_even_exchanges_prices_by_uneven_ones_as_earlier_versions_did() -> None:
    nodes, case, prices = Cluster.parse("2x2", ["inter=1:0:2"]), CASES["routed_exchange"], []
    for knows_axis in (True, False):
        taken = []
        for trip in ({"bytes": 2**power, **way} for power in range(10, 23, 2) for way in ways(4) if not way["even"]):
            size = trip if knows_axis else {axis: value for axis, value in trip.items() if axis != "even"}
            taken.append(Measurement.of(size, case.work(trip, 4), [1e-9 * case.work(trip, 4)] * 6))
        one = series("routed_exchange", 4, "inter", sizes=[taken[0].size, taken[-1].size])
        one = one.model_copy(update={"measurements": tuple(taken), "fit": fit_series(case, 4, taken)})
        profile = measured_profile(nodes, one, series("all_to_all", 2, "intra"))
        costs = known(CostModel.of(profile, nodes, IN_FLOATS, samples=False))
        port = np.array([2.0**18])
        prices.append(float(known(costs.exchange)[1](port, port, np.ones(1)).seconds[0]))
    assert prices[0] == pytest.approx(prices[1])


@pytest.mark.parametrize(("cluster", "shared_by"), [("1x4", 1.0), ("4x1", 1.0), ("2x2", 1.0), ("2x2", 2.0)])
def test_an_exchange_as_even_as_one_measured_takes_as_long_and_one_between_a_time_between(
    cluster: str, shared_by: float
) -> None:
    """Even exchanges take 1.5 times as long as uneven ones whose busiest rank sends as much."""
    nodes = Cluster.parse(cluster, [f"inter=1:0:{shared_by}"] if cluster != "1x4" else [])
    size, group, case = nodes.num_devices, nodes.devices_per_node, CASES["routed_exchange"]
    link: Any = "inter" if nodes.num_nodes > 1 else "intra"
    taken = []
    for trip in ({"bytes": 2**power, **way} for power in range(10, 23, 2) for way in ways(size)):
        work = case.work(trip, size)
        taken.append(Measurement.of(trip, work, [1e-9 * work * (1.5 if trip["even"] else 1.0)] * 6))
    one = series("routed_exchange", size, link, sizes=[taken[0].size, taken[-1].size])
    one = one.model_copy(update={"measurements": tuple(taken), "fit": fit_series(case, size, taken)})
    inside = [series("all_to_all", group, "intra")] if 1 < group < size else []
    costs = known(CostModel.of(measured_profile(nodes, one, *inside), nodes, IN_FLOATS, samples=False))
    node_D, found = np.arange(size) // group, list[float]()
    for part in (0.0, 0.5, 1.0):
        sent_DD = sum(
            share * copies_DD(2**20, 100 // size, size, even=even) for share, even in ((1 - part, False), (part, True))
        )
        away_DD = sent_DD * ((node_D[:, None] != node_D) if link == "inter" else ~np.eye(size, dtype=bool))
        ports = np.zeros((1, 1, 1 + len(inside), 2, size))
        ports[0, 0, -1] = away_DD.sum(1), away_DD.sum(0)
        kept = np.diag(sent_DD)[None, None, None, None] * (link == "intra" or group == 1)
        (seconds,) = exchange_seconds(ports, 512.0, known(costs.exchange), kept, shared=costs.shared)[-1:]
        found.append(seconds.seconds[0, 0])
        assert not seconds.extrapolated.any()
    sends = 1e-9 * 2**20 * (1 - 100 // size / 100)
    assert found[0] == pytest.approx(sends, rel=0.02)
    assert found[2] == pytest.approx(1.5 * sends, rel=0.02)
    assert found[1] == pytest.approx((found[0] + found[2]) / 2, rel=0.06)


def test_training_is_priced_where_devices_share_a_link_and_nobody_holds_replicas(make_trace: Any) -> None:
    """Evened ports take on a shared link what they take on ports of their own; uneven ones no more."""
    spec = replace(make_trace(samples=8).model, hidden_size=8, ffn_size=8, dtype_bytes=4)
    parts = []
    for link in ("inter=1:5", "inter=1:5:2"):
        scene = scene_of(make_trace(samples=8), Cluster.parse("2x2", ("intra=1:5", link)), passes=Passes(2.0, False))
        costs = CostModel.of(None, scene.cluster, spec, samples=False)
        experts = lambda pairs, _: Prediction(0 * pairs, 0 * pairs, 0 * pairs, pairs < 0)  # noqa: E731
        scene = replace(scene, model=spec, costs=replace(known(costs), experts=experts))
        parts.append(priced(scene, Journey("standard", Placement.from_sets([[[0, 1], [2, 3], [4, 5], [6, 7]]] * 3, 8))))
    alone, shared = parts
    np.testing.assert_allclose(shared["ideal_step_s"], alone["ideal_step_s"])
    assert (shared["step_s"] < alone["step_s"]).all()
    assert not shared["sums_s"].any()


def trips_of(ranks: int) -> list[dict[str, int]]:
    return [{"bytes": 2**power, **way} for power in (10, 14, 18) for way in ways(ranks)]


def copied(copy_s: float, even_s: float = 1e-9) -> list[Curve3]:
    """Exchanges over 4 ranks, of tokens that return and move on, by a profile.

    In it a byte kept takes so long, and one sent 1 ns, in even exchanges `even_s`.
    """
    case, measured = CASES["routed_exchange"], list[Measurement]()
    for size in ({"bytes": 2**power, **way} for power in range(10, 19) for way in ways(4)):
        work = case.work(size, 4)
        took = 1e-5 + (even_s if size["even"] else 1e-9) * work + copy_s * (2 * size["bytes"] - work)
        measured.append(Measurement.of(size, work, [took] * 6))
    one = series("routed_exchange", 4, "intra", sizes=[measured[0].size, measured[-1].size])
    one = one.model_copy(update={"measurements": tuple(measured), "fit": fit_series(case, 4, measured)})
    costs = CostModel.of(measured_profile(Cluster(1, 4), one), Cluster(1, 4), IN_FLOATS, samples=False)
    return [known(curves)[0] for curves in (known(costs).exchange, known(costs).onward)]


@pytest.mark.parametrize("moves", [0, 1])
@pytest.mark.parametrize("part", [0.1, 0.3, 0.6, 0.75])
def test_even_exchanges_take_longer_by_what_is_sent_not_by_what_is_kept(part: float, moves: int) -> None:
    """Measured are tokens that return, 25 % kept; sent are these parts of 64 KiB."""
    curve, handled = copied(1e-9, even_s=1.5e-9)[moves], np.array([2.0**16])
    uneven, even = (float(curve(part * handled, handled, np.array([x])).seconds[0]) for x in (0.0, 1.0))
    assert even - uneven == pytest.approx(0.5e-9 * part * 2**16, rel=0.15)


@pytest.mark.parametrize("copy_s", [0.0, 3e-10, 1e-9])
def test_an_exchange_takes_what_is_sent_and_what_is_copied_however_much_ranks_keep(copy_s: float) -> None:
    """Measured are 25 and 62 % kept, between which the fit errs; fewer than 25 % are taken for that."""
    curve = copied(copy_s)[0]
    least_s = 5e-6 + 1024 * (0.38 * 1e-9 + 0.62 * copy_s)  # the smallest call measured

    @given(st.floats(2**11, 2**17), st.lists(st.floats(0, 1), min_size=2, max_size=2).map(sorted))
    def holds(handled: float, sent: list[float]) -> None:
        less, more = (curve(np.array([part * handled]), np.array([handled]), np.ones(1)) for part in sent)
        assert less.seconds[0] <= more.seconds[0] * (1 + 1e-9)
        for part, half in zip(sent, (less, more), strict=True):
            own = max(1 - part, part / 3) * handled
            assert half.seconds[0] == pytest.approx(max(5e-6 + 1e-9 * part * handled + copy_s * own, least_s), rel=0.15)
            assert half.low[0] <= half.seconds[0] <= half.high[0]
            assert half.extrapolated[0] or part > 0.37

    holds()


def test_a_profile_of_exchanges_without_what_ranks_keep_is_to_be_measured_again() -> None:
    profile, key = of_runtime(), "routed_exchange/uint8@4/intra"
    old = profile.series[key]
    taken = [
        Measurement.of({"bytes": 2**power, "moves": moves}, 2**power, [1e-3] * 6)
        for power in (9, 12)
        for moves in (0, 1)
    ]
    sizes = {axis: np.array([one.size[axis] for one in taken]) for axis in ("bytes", "moves")}
    fit = fit_arrays(sizes, sizes["bytes"] / 1.0, sizes["bytes"] * 1e-9, curve="bytes")
    series_of = {**profile.series, key: old.model_copy(update={"measurements": tuple(taken), "fit": fit})}
    profile = profile.model_copy(update={"series": series_of})
    with pytest.raises(InputError, match=r"^the profile's routed_exchange/uint8@4/intra .* moeplan profile$"):
        CostModel.of(profile, profile.cluster, IN_FLOATS, samples=False)
