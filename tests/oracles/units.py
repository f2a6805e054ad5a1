"""Units of a trace by DESIGN's rules, row by row: which part each belongs to, where it starts, and in which step."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

from moeplan.planner.evaluate.scene import Scene
from moeplan.planner.evaluate.splits import Cohort
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


def read_parts(scene: Scene, *, seed: int, fraction: float, samples_per_step: int) -> list[Part]:
    """The fitted units, then the others; samples one by one in every step where the scene may move them."""
    trace, moving = scene.source, scene.samples is not None
    of_counts, size = isinstance(trace, CountTrace), scene.cluster.num_devices
    pairs, ranks, recorded = read_rows(trace, moving=moving, of_counts=of_counts)
    names = sorted({name for name, _ in pairs})
    most = {name: max(count for (other, _), count in pairs.items() if other == name) for name in names}
    top_k = trace.meta.model.top_k if of_counts else 1
    tokens = {name: count // top_k if moving else -(-count // top_k) for name, count in most.items()}
    whole_steps = moving and "step" in trace.known and len({sample for _, sample in names}) == len(names)
    keys = {name: name[0] if whole_steps else name[-1] for name in names}
    fitted = [name for name in names if hash_of(f"{seed}:{keys[name]}") < int(fraction * 2**64)]
    ranked = bool(ranks) and max(ranks.values()) + 1 == size and (moving or not of_counts)
    parts = []
    for units in (fitted, [name for name in names if name not in fitted]):
        own = sorted({step for name, step in recorded if name in units})
        whole = max(len(units) // samples_per_step, 1)
        homes: list[int] | None = [number % size for number in range(len(units))]
        if ranked:
            homes = [ranks[name] for name in units] if moving else None
        derived = (number // samples_per_step for number in range(len(units)))
        steps: list[int] | None = [step if step < whole else -1 for step in derived]
        if own:
            steps = [own.index(name[0]) for name in units] if moving else None
        if units:
            parts.append(Part(units, [tokens[name] for name in units], homes, steps, len(own) or whole))
    return parts


def read_rows(trace: Any, *, moving: bool, of_counts: bool) -> Rows:
    """Count a trace row by row: pairs by unit and layer of counts, else tokens."""
    rows: Rows = (Counter(), {}, set())
    number = 0
    for batch in trace.tables() if of_counts else trace.batches():
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
    assert (None if cohort.step is None else cohort.step.tolist()) == part.steps
    assert cohort.num_steps == part.num_steps
    assert cohort.dropped == (0 if part.steps is None else part.steps.count(-1))
