"""Units of a trace by DESIGN's rules, row by row: which part each belongs to, where it starts, and in which step; and
the tokens of concurrent sequences, one by one.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moeplan.planner.evaluate.cohort import Cohort
from moeplan.planner.evaluate.scene import Scene
from moeplan.planner.evaluate.step_size import StepSize
from moeplan.planner.evaluate.steps import FEW, ITERATIONS
from moeplan.traces.count_form import CountTrace

BLOCK_ROWS = 64
Name = tuple[int, ...]
Rows = tuple[Counter[tuple[Name, int]], dict[Name, int], set[tuple[Name, int]]]  # pairs, ranks and steps of units


@dataclass
class Part:
    """Units in their order with their tokens, and the home and the step of each where a unit has one; -1: no step."""

    units: list[Name]
    tokens: list[int]
    homes: list[int] | None
    steps: list[int] | None
    num_steps: int


@dataclass(frozen=True)
class Seat:
    """Where a token of a sequence runs: the lane, the iteration, and how many lanes there are."""

    lane: int
    iteration: int
    lanes: int


def read_parts(scene: Scene, *, seed: int, fraction: float, size: StepSize) -> list[Part]:
    """The fitted units, then the others; samples one by one in every step where the scene may move them."""
    trace, moving = scene.source, scene.samples is not None
    of_counts, devices = isinstance(trace, CountTrace), scene.cluster.num_devices
    pairs, ranks, recorded = read_rows(trace, moving=moving, of_counts=of_counts, phases=scene.phases)
    names = sorted({name for name, _ in pairs})
    most = {name: max(count for (other, _), count in pairs.items() if other == name) for name in names}
    top_k = trace.meta.model.top_k if of_counts else 1
    tokens = {name: count // top_k if moving else -(-count // top_k) for name, count in most.items()}
    whole_steps = moving and "step" in trace.known and len({sample for _, sample in names}) == len(names)
    keys = {name: name[0] if whole_steps else name[-1] for name in names}
    fitted = [name for name in names if hash_of(f"{seed}:{keys[name]}") < int(fraction * 2**64)]
    told = moving or not of_counts or "step" in trace.known
    ranked = bool(ranks) and max(ranks.values()) + 1 == devices and told
    parts = []
    for units in (fitted, [name for name in names if name not in fitted]):
        own = sorted({step for name, step in recorded if name in units})
        homes: list[int] | None = [number % devices for number in range(len(units))]
        if ranked:
            homes = [ranks[name] for name in units] if moving else None
        steps: list[int] | None = steps_of(
            [tokens[name] if size.unit == "tokens" else 1 for name in units], size.number
        )
        num_steps = len(own) or len({step for step in steps or [] if step >= 0})
        if own:
            steps = [own.index(name[0]) for name in units] if moving else None
        elif size.unit == "sequences":
            homes, steps, num_steps = None, None, 0
        if units:
            parts.append(Part(units, [tokens[name] for name in units], homes, steps, num_steps))
    return parts


def steps_of(sizes: list[int], number: int) -> list[int]:
    """The step of each unit: units stand in a row, cut after every so many; that which their beginning falls into."""
    row = [unit for unit, size in enumerate(sizes) for _ in range(size)]
    if len(row) < number:
        return [0 for _ in sizes]
    complete = [row[at : at + number] for at in range(0, len(row) - number + 1, number)]
    steps, known = [-1 for _ in sizes], -1
    for cut in complete:
        begins = [unit for at, unit in enumerate(cut) if steps[unit] < 0 and unit not in cut[:at]]
        known += bool(begins)
        for unit in begins:
            steps[unit] = known
    return steps


def seats_of(scene: Scene, units: list[Name], concurrency: int) -> dict[tuple[int, int], Seat]:
    """Sample and position to where each token runs, -1 for those left over: sequences stand in a row, cut into lanes of
    one length.
    """
    positions: dict[int, list[int]] = {}
    for batch in scene.source.batches(phases=scene.phases or None):  # type: ignore[union-attr]
        assert batch.sample is not None
        for sample, position in zip(batch.sample.tolist(), batch.position.tolist(), strict=True):
            positions.setdefault(sample, []).append(position)
    row = [(name, at) for (name,) in units for at in range(min(positions[name]), max(positions[name]) + 1)]
    length = max(len(row) // concurrency, 1)
    lanes = [row[at : at + length] for at in range(0, len(row), length)][:concurrency]
    lanes = [lane for lane in lanes if len(lane) == length]
    seats = {place: Seat(number, i, len(lanes)) for number, lane in enumerate(lanes) for i, place in enumerate(lane)}
    return {place: seats.get(place, Seat(-1, -1, len(lanes))) for place in row if place[1] in positions[place[0]]}


def read_rows(trace: Any, *, moving: bool, of_counts: bool, phases: Sequence[str] = ()) -> Rows:
    """Count a trace row by row: pairs by unit and layer of counts, else tokens."""
    rows: Rows = (Counter(), {}, set())
    number = 0
    for batch in trace.tables() if of_counts else trace.batches(phases=phases or None):
        for row in range(len(batch)):
            columns = (batch.step, batch.sample, batch.source_rank)
            step, sample, rank = (None if one is None else int(one[row]) for one in columns)
            keys = (step, sample) if of_counts else (sample, step)
            unit = next((key for key in keys if key is not None), 0 if of_counts else number // BLOCK_ROWS)
            name = (step or 0, sample or 0) if moving else (unit,)
            layer, count = (int(batch.layer[row]), int(batch.counts[row].sum())) if of_counts else (0, 1)
            rows[0][name, layer] += count
            number += 1
            if rank is not None:
                rows[1][name] = rank
            if step is not None:
                rows[2].add((name, step))
    return rows


def hash_of(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)


def assert_part(part: Part, cohort: Cohort) -> None:
    """A cohort has the units, tokens, homes and steps of a part."""
    assert len(cohort.unit_ids) == len(part.units)
    if len(part.units[0]) == 1:
        assert cohort.unit_ids.tolist() == [unit for (unit,) in part.units]
    assert cohort.unit_tokens.tolist() == part.tokens
    assert (None if cohort.home is None else cohort.home.tolist()) == part.homes
    blocks = 1 if cohort.blocks is None else cohort.blocks.per_step
    steps = None if cohort.step is None else [row // blocks if row >= 0 else -1 for row in cohort.step.tolist()]
    assert steps == part.steps
    if cohort.lanes is None:
        assert cohort.num_steps == part.num_steps
    assert cohort.dropped == (0 if part.steps is None else part.steps.count(-1))


def assert_blocks(part: Part, cohort: Cohort, size: StepSize) -> None:
    """The blocks of a cohort hold the units of their steps in order, one after another, and nothing else."""
    if part.steps is None or cohort.blocks is None:
        return
    assert cohort.step is not None
    assert part.num_steps < FEW
    sums = Counter[int]()
    for row, tokens in zip(cohort.step.tolist(), part.tokens, strict=True):
        sums[row] += tokens
    assert cohort.blocks.tokens.tolist() == [sums[row] for row in range(len(cohort.blocks.tokens))]
    kept = [row for row in cohort.step.tolist() if row >= 0]
    assert kept == sorted(kept)
    for step in range(part.num_steps):  # as many units as possible in each block of a step, one more or fewer
        units = Counter(row for row in kept if row // cohort.blocks.per_step == step)
        assert max(units.values()) - min(units.values()) <= 1
    there = sum(part.tokens if size.unit == "tokens" else [1 for _ in part.tokens])
    assert cohort.blocks.scale == max(size.number / there, 1)


def assert_lanes(scene: Scene, part: Part, cohort: Cohort, concurrency: int) -> None:
    """The tokens of a cohort run where the oracle has them, on the device of their lane, in groups of lanes."""
    seats, devices, blocks, lanes = (
        seats_of(scene, part.units, concurrency),
        scene.cluster.num_devices,
        cohort.blocks,
        cohort.lanes,
    )
    assert blocks is not None
    assert lanes is not None
    length, counted = max(seat.iteration for seat in seats.values()) + 1, lanes.iterations.tolist()
    assert counted == sorted(set(counted))
    assert (counted[0], counted[-1], len(counted)) == (0, length - 1, min(length, ITERATIONS))
    group_of_lane, met = dict[int, int](), Counter[tuple[int, int]]()
    for batch, unit_T in scene.index.batches(scene.source, scene.phases or None):  # type: ignore[arg-type]
        at = cohort.locate(batch, unit_T)
        for row, step, home in zip(at.rows.tolist(), at.step.tolist(), at.home.tolist(), strict=True):
            place = int(unit_T[row]), int(batch.position[row])
            seat = seats.pop(place)  # once
            if seat.iteration not in counted or seat.lane < 0:
                assert step == -1
                continue
            iteration, group = divmod(step, blocks.per_step)
            assert counted[iteration] == seat.iteration
            assert group_of_lane.setdefault(seat.lane, group) == group  # in every iteration
            assert cohort.ranked or home == seat.lane % devices
            met[iteration, seat.lane] += 1
    assert not seats
    assert set(met.values()) <= {1}
    number = max((lane for _, lane in met), default=0) + 1
    assert [group for _, group in sorted(group_of_lane.items())] == sorted(group_of_lane.values())  # side by side
    if sum(part.tokens) >= concurrency and lanes.length * lanes.number <= sum(part.tokens) and not gaps(part, cohort):
        assert number == concurrency
        assert len(met) == concurrency * len(counted)
        members = Counter(group_of_lane.values())
        assert max(members.values()) - min(members.values()) <= 1
        assert blocks.scale == 1
    assert abs(blocks.tokens_per_step - concurrency) < 1e-9 * concurrency


def gaps(part: Part, cohort: Cohort) -> bool:
    """Check whether positions between a sequence's tokens hold none."""
    assert cohort.lanes is not None
    return cohort.lanes.length * cohort.lanes.number > sum(part.tokens) or bool(
        cohort.lanes.offset[-1] > sum(part.tokens[:-1])
    )
