"""Steps as they are filled and drawn, and what intervals from few of them are worth."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.planner.evaluate.evaluate import evaluate, verdict
from moeplan.planner.evaluate.journey import Contender, Journey, today
from moeplan.planner.evaluate.replay import replay
from moeplan.planner.evaluate.step_size import StepSize, use_of, usual_size
from moeplan.planner.evaluate.steps import FEW, Blocks, Lanes, filled, filled_blocks
from moeplan.planner.evaluate.units import SampleIndex, UnitIndex, index_units
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Metric
from moeplan.solvers.placement import Placement
from moeplan.traces.schema import TokenBatch
from tests.builders import known, model
from tests.planner.makers import scene_of, stored, stored_tokens

LAYERS, EXPERTS, DEVICES, LENGTH = 2, 16, 4, 40
CLUSTER, MODEL = Cluster(1, DEVICES), model(LAYERS, EXPERTS, 1, name="made")
Numbers = NDArray[np.int64]

# Samples have preferences of their own about these, `[L, E]`; the plan evens out the mean.
MEAN = np.random.default_rng(5).dirichlet(np.full(EXPERTS, 3.0), LAYERS)
OWN = 20.0  # concentration of preferences
DECODE, PREFILL = StepSize("sequences", 128), StepSize("tokens", 400)


def samples(*, step: list[int] | None = None, rank: list[int] | None = None, sample: Any = range(4)) -> SampleIndex:
    """Four samples of two tokens."""
    by_step, by_rank = (None if one is None else np.array(one) for one in (step, rank))
    return SampleIndex(np.array(sample), by_step, by_rank, np.full(4, 2), np.full(4, 4))


@pytest.mark.parametrize(("devices", "homes"), [(2, [1, 1, 0, 0]), (3, [0, 1, 2, 0])])
def test_samples_start_on_their_recorded_ranks_where_there_are_as_many_devices(devices: int, homes: list[int]) -> None:
    chosen = np.ones(4, bool)
    cohort = samples(rank=[1, 1, 0, 0]).cohort(chosen, num_devices=devices, size=StepSize("samples", 3))
    assert known(cohort.home).tolist() == homes
    assert known(cohort.step).tolist() == [0, 0, 0, -1]
    assert (cohort.num_steps, cohort.dropped, cohort.num_tokens, cohort.tokens_per_step) == (1, 1, 8, 6.0)


def test_units_start_on_recorded_ranks_where_there_are_as_many_devices() -> None:
    index = UnitIndex("sample", np.arange(4), np.full(4, 2), None, num_source_ranks=2)
    there, other = (
        index.cohort(np.ones(4, bool), num_devices=devices, size=StepSize("samples", 2)) for devices in (2, 3)
    )
    assert (there.num_ranks, there.home) == (2, None)
    assert (other.num_ranks, known(other.home).tolist()) == (0, [0, 1, 2, 0])


def test_steps_are_fitted_whole_unless_a_sample_is_in_several() -> None:
    assert samples(step=[0, 0, 1, 1]).split_kind == "step"
    assert samples(step=[0, 0, 1, 1], sample=[0, 1, 1, 2]).split_kind == "sample"
    assert samples().split_kind == "sample"


def test_a_token_of_which_pairs_are_missing_is_counted(tmp_path: Path) -> None:
    counts = np.array([[[3, 0], [2, 0]], [[1, 3], [2, 2]]])
    assert index_units(stored(tmp_path / "counts", counts, top_k=2)).unit_tokens.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("sizes", "number", "steps"),
    [
        ([4, 4, 4, 4], 8, [0, 0, 1, 1]),
        ([5, 30, 5], 10, [0, 0, 1]),  # the second is three steps long: none begins in the two that it fills
        ([3, 3, 3, 3], 5, [0, 0, 1, 1]),
        ([5, 5, 5], 10, [0, 0, -1]),
        ([1, 1], 10, [0, 0]),
        ([0, 0, 2], 2, [0, 0, 0]),
        ([], 4, []),
    ],
)
def test_a_unit_is_in_the_step_that_its_beginning_falls_into(sizes: list[int], number: int, steps: list[int]) -> None:
    assert filled(np.array(sizes, np.int64), number).tolist() == steps


@pytest.mark.parametrize(
    ("phases", "size", "purpose", "whole", "use", "tokens"),
    [
        (("decode",), None, None, False, "decode", 64),
        (("decode",), None, None, True, "prefill", 4096),  # samples that move are no single tokens
        (("prefill",), None, None, False, "prefill", 4096),
        (("prefill", "decode"), None, None, False, "prefill", 4096),
        (("train",), None, None, False, "training", 8192),
        (("train",), None, "serving", False, "prefill", 4096),
        (("prefill",), None, "training", False, "training", 8192),
        (("prefill",), DECODE, None, False, "decode", 64),
        (("decode",), PREFILL, None, False, "prefill", 4096),
        ((), None, None, True, None, 4096),  # counts have no phase
        ((), None, "training", True, "training", 8192),
    ],
)
def test_what_runs_and_how_much_of_it_follows_from_phases_size_and_purpose(
    phases: tuple[str, ...], size: StepSize | None, purpose: str | None, whole: bool, use: str | None, tokens: int
) -> None:
    found = use_of(phases, size, purpose, whole=whole)
    assert found == use
    assert usual_size(found, 8) == StepSize("sequences" if use == "decode" else "tokens", 8 * tokens)


def blocks_of(kind: str, folder: Path) -> Blocks:
    """Blocks of samples in three steps, or of lanes."""
    if kind == "tokens":
        sizes = np.random.default_rng(0).integers(5, 50, 90)
        (_, blocks) = filled_blocks(sizes, sizes, int(sizes.sum()) // 3)
    else:
        (cohort,) = scene_of(population(0, folder, 60), CLUSTER, each=DECODE).cohorts
        blocks = cohort.blocks
    assert blocks is not None
    return blocks


@pytest.mark.parametrize("kind", ["tokens", "lanes"])
def test_drawn_steps_have_as_many_tokens_as_the_mean_one_and_repeat_with_the_seed(kind: str, tmp_path: Path) -> None:
    blocks = blocks_of(kind, tmp_path)
    drawn = blocks.draws(3)
    assert len(drawn) >= 300
    np.testing.assert_allclose(drawn @ blocks.tokens, blocks.tokens_per_step)
    np.testing.assert_array_equal(drawn, blocks.draws(3))
    assert (drawn != blocks.draws(4)).any()
    assert len(np.unique(drawn, axis=0)) > 0.9 * len(drawn)


def test_the_steps_of_a_draw_take_the_same_lanes_at_different_iterations(tmp_path: Path) -> None:
    blocks = blocks_of("lanes", tmp_path)
    draws = blocks.draws(0).reshape(-1, blocks.each, blocks.num_steps, blocks.per_step)
    for draw in draws:
        iterations = [set(np.flatnonzero(step.any(axis=1)).tolist()) for step in draw]
        assert [len(one) for one in iterations] == [1] * blocks.each  # all tokens of a step at once
        assert len(set.union(*iterations)) == blocks.each
        lanes = np.stack([step.sum(axis=0) for step in draw])
        np.testing.assert_allclose(lanes, np.tile(lanes[0], (blocks.each, 1)))


def test_lanes_are_at_home_on_the_devices_in_turn_and_a_step_has_a_token_of_each_sequence() -> None:
    lanes = Lanes.of(np.array([0, 0]), np.array([8, 8]), concurrency=4, devices=2)
    block, home = lanes.place(np.repeat([0, 1], 8), np.tile(np.arange(8), 2))
    np.testing.assert_array_equal(home, np.repeat([0, 1, 0, 1], 4))
    assert sorted(block) == [*range(16)]
    for density in (1.0, 0.5):  # of positions that hold a token
        assert lanes.blocks(4, density).tokens_per_step == 4
        assert lanes.blocks(6, density).tokens_per_step == 6


def test_too_few_blocks_are_not_drawn_from() -> None:
    sizes = np.full(FEW - 1, 10)
    (_, blocks) = filled_blocks(sizes, sizes, 35)
    assert blocks is not None
    assert not len(blocks.draws(0))


@pytest.mark.parametrize("size", [DECODE, PREFILL, StepSize("samples", 9)])
def test_steps_hold_the_pairs_of_their_blocks_and_a_part_of_less_than_one_is_scaled_up(
    size: StepSize, tmp_path: Path
) -> None:
    trace, journey = population(0, tmp_path / "whole", 30), today(MODEL, CLUSTER).journey
    ((tally,),) = replay(scene_of(trace, CLUSTER, each=size), [journey], between=True)
    assert tally.blocks is not None
    each = {"samples": LENGTH * size.number}.get(size.unit, size.number)
    assert tally.loads.sum() == tally.blocks.loads.sum() == len(tally.loads) * each * LAYERS
    large = size.times(1e3)
    ((scaled,),) = replay(scene_of(trace, CLUSTER, each=large), [journey], between=True)
    whole = {"samples": LENGTH * large.number}.get(size.unit, large.number) * LAYERS
    assert scaled.loads.sum() == pytest.approx(len(scaled.loads) * whole, rel=1e-3)
    assert scaled.between is not None


def population(seed: int, folder: Path, samples: int, *, alike: bool = False, own: float = OWN) -> Any:
    """A trace of samples whose tokens choose experts by their sample's own preferences, or of one sample's tokens."""
    rng = np.random.default_rng(seed)
    ids = drawn_ids(rng, 1 if alike else samples, LENGTH, own)
    if alike:
        ids = np.repeat(ids, samples, axis=0)
    return stored_tokens(folder, MODEL, tokens_of(ids.reshape(-1, LAYERS)))


def tokens_of(ids: Numbers) -> TokenBatch:
    """Tokens of samples one after another, by the expert of each, `[T, L]`."""
    samples = len(ids) // LENGTH
    return TokenBatch(
        step=None,
        sample=np.repeat(np.arange(samples), LENGTH),
        position=np.tile(np.arange(LENGTH, dtype=np.int32), samples),
        source_rank=None,
        phase=np.zeros(len(ids), np.int8),
        ids=ids[:, :, None].astype(np.uint16),
    )


def drawn_ids(rng: np.random.Generator, samples: int, length: int, own: float = OWN) -> Numbers:
    """The expert of every token, `[samples, length, L]`."""
    wishes = np.stack([rng.dirichlet(own * mean, samples) for mean in MEAN], axis=1)
    chosen = (rng.random((samples, length, LAYERS, 1)) > np.cumsum(wishes, -1)[:, None]).sum(axis=-1)
    return np.asarray(np.minimum(chosen, EXPERTS - 1), np.int64)


def plan() -> Placement:
    """Experts by falling mean load, each on the device that has least."""
    layers = []
    for mean in MEAN:
        sets: list[list[int]] = [[] for _ in range(DEVICES)]
        for expert in np.argsort(-mean).tolist():
            room = [one for one in sets if len(one) < EXPERTS // DEVICES]
            min(room, key=lambda one: mean[one].sum()).append(expert)
        layers.append(sets)
    return Placement.from_sets(layers, EXPERTS)


def share_of(trace: Any, size: StepSize) -> Metric:
    """What the plan gains of today's balance."""
    contenders = [Contender("plan", Journey("standard", plan())), today(MODEL, CLUSTER)]
    share = verdict(evaluate(scene_of(trace, CLUSTER, each=size), contenders), "balance").share
    assert share is not None
    return share


def width(share: Metric) -> float:
    assert share.low is not None
    assert share.high is not None
    return share.high - share.low


def test_the_interval_of_few_steps_is_a_point_of_like_samples_and_wide_of_others(tmp_path: Path) -> None:
    alike, little, much = (
        width(share_of(population(1, tmp_path / str(at), 40, alike=at == 0, own=own), PREFILL))
        for at, own in enumerate((20.0, 1e4, 4.0))
    )
    assert alike < 1e-9
    assert little > 0.01
    assert much > 1.5 * little


def test_the_interval_of_an_even_balance_begins_at_1_below_which_none_is(tmp_path: Path) -> None:
    samples = 64  # all tokens of each on one device, as many on every one
    ids = np.repeat(np.arange(samples) % DEVICES * (EXPERTS // DEVICES), LENGTH)
    trace = stored_tokens(tmp_path / "t", MODEL, tokens_of(np.stack([ids] * LAYERS, axis=1)))
    scene = scene_of(trace, CLUSTER, each=StepSize("tokens", len(ids)))
    balance = evaluate(scene, [today(MODEL, CLUSTER)]).evaluation.fit.contenders[0].metrics["balance"]
    assert balance.value == balance.low == 1.0
    assert balance.high is not None
    assert balance.high > 1.1


@pytest.mark.parametrize("size", [PREFILL, DECODE], ids=lambda one: str(one))
def test_steps_drawn_a_few_at_a_time_give_the_same_interval(
    size: StepSize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = population(3, tmp_path, 40)
    together = share_of(trace, size)
    monkeypatch.setattr("moeplan.planner.evaluate.evaluate.DRAWN_CELLS", 7 * LAYERS * DEVICES)
    apart = share_of(trace, size)
    assert width(together) > 0
    assert (apart.value, apart.low, apart.high) == pytest.approx((together.value, together.low, together.high))


def test_sequences_of_one_expert_each_leave_the_mean_of_few_of_them_uncertain(tmp_path: Path) -> None:
    """Where an iteration says all of its sequences, more iterations say no more: sixteen of 12 sequences are no sample
    of sixteen.
    """
    few, many = (share_of(population(2, tmp_path / str(samples), samples, own=0.5), DECODE) for samples in (12, 480))
    assert width(few) > 2.5 * width(many)


@pytest.mark.parametrize(
    ("size", "samples", "own"),
    [
        *[(PREFILL, 24, OWN), (PREFILL, 60, OWN), (DECODE, 40, OWN), (DECODE, 160, OWN)],
        (StepSize("sequences", 6), 6, 2.0),  # few lanes, of very different sequences
    ],
    ids=lambda one: str(one),
)
def test_intervals_from_small_traces_hold_the_gain_of_the_population(
    size: StepSize, samples: int, own: float, tmp_path: Path
) -> None:
    """Its gain is that of 3,000 steps of samples met once; of 40 traces at least 34 have it in their intervals, which
    are of the width that the traces differ by.
    """
    rng, ratios = np.random.default_rng(99), np.zeros(2)
    each = 1 if size.unit == "sequences" else LENGTH
    held = [
        np.stack([one.holds(layer).argmax(axis=1) for layer in range(LAYERS)])
        for one in (plan(), today(MODEL, CLUSTER).journey.placement)
    ]
    for _ in range(3000):
        ids = drawn_ids(rng, size.number // each, each, own).reshape(-1, LAYERS)
        for at, device in enumerate(held):
            loads = [np.bincount(device[layer][ids[:, layer]], minlength=DEVICES) for layer in range(LAYERS)]
            ratios[at] += np.mean([load.max() * DEVICES / load.sum() for load in loads])
    truth = 1 - ratios[0] / ratios[1]
    shares = [share_of(population(seed, tmp_path / str(seed), samples, own=own), size) for seed in range(40)]
    covered = [one.low is not None and one.high is not None and one.low <= truth <= one.high for one in shares]
    assert sum(covered) >= 34
    spread = float(np.std([one.value for one in shares]))
    assert 0.6 * 3.92 * spread < np.mean([width(one) for one in shares]) < 2 * 3.92 * spread
