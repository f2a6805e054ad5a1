"""Census of a trace: its units, the part each belongs to, where and when it runs, counted again by DESIGN's rules.

Units are samples, else recorded steps, else blocks of rows; where samples may be re-homed, each sample in each step.

Legend: I units by name; M members of a part; R rows; L MoE layers; E experts.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError
from ...traces.count_form import CountTable, CountTrace
from ...traces.reader import Trace
from ...traces.schema import TokenBatch
from ..evaluate.scene import Scene
from ..evaluate.splits import Cohort

__all__ = ["Census", "Roster", "Rows", "Source", "take_census"]

BLOCK_ROWS = 64
Numbers = NDArray[np.int64]
Name = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A trace whose tokens of some phases (empty: all) are counted, by unit or by step and sample."""

    trace: Trace | CountTrace
    phases: tuple[str, ...]
    by_step: bool

    @classmethod
    def of(cls, scene: Scene) -> Self:
        """Source of a scene."""
        return cls(scene.source, tuple(scene.phases), scene.samples is not None)

    def named(self, *, layers: bool) -> Iterator[tuple[TokenBatch | CountTable, Numbers]]:
        """Batches or tables with the name of each row's unit, `[R, 1]`, or its step and sample, `[R, 2]`."""
        trace, row = self.trace, 0
        of_counts = isinstance(trace, CountTrace)
        wanted = None if layers else ()
        rows = trace.tables() if isinstance(trace, CountTrace) else trace.batches(wanted, phases=self.phases or None)
        for batch in rows:
            keys = (batch.step, batch.sample) if of_counts else (batch.sample, batch.step)
            unit = next((key for key in keys if key is not None), None)
            if unit is None:
                unit = np.zeros(len(batch), int) if of_counts else (np.arange(len(batch)) + row) // BLOCK_ROWS
            row += len(batch)
            columns = [unit]
            if self.by_step:
                columns = [np.zeros(len(batch), int) if batch.step is None else batch.step, _column(batch.sample)]
            yield batch, np.stack(columns, axis=1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a batch or a table, `[R]`: numbers in it, and of each its unit, place, ordinal, home and step.

    A place is a unit's among all, an ordinal among its part; the step of an incomplete one is -1.
    """

    number: Numbers
    unit: Numbers
    place: Numbers
    ordinal: Numbers
    home: Numbers
    step: Numbers


@dataclass(frozen=True, slots=True, eq=False)
class Roster:
    """One part of a trace: its members by place and by id, the tokens of each, and how homes and steps follow.

    Parameters
    ----------
    home
        Of each member; None: each row's own source rank.
    step
        Of each member, -1 in an incomplete one; None: each row's own, one of `step_ids`.
    """

    members: Numbers
    unit_ids: Numbers
    tokens: Numbers
    home: Numbers | None
    step: Numbers | None
    step_ids: Numbers
    num_steps: int

    @property
    def dropped(self) -> int:
        """Members in no complete step."""
        return 0 if self.step is None else int((self.step < 0).sum())

    def rows(self, batch: TokenBatch | CountTable, unit_R: Numbers, place_R: Numbers) -> Rows:
        """The rows that belong to this part, of a batch whose rows are of these units."""
        ordinal_I = np.full(max(int(place_R.max(initial=0)), int(self.members.max())) + 1, -1)
        ordinal_I[self.members] = np.arange(len(self.members))
        number = np.flatnonzero(ordinal_I[place_R] >= 0)
        ordinal = ordinal_I[place_R[number]]
        home = _column(batch.source_rank)[number] if self.home is None else self.home[ordinal]
        index_of = {step: index for index, step in enumerate(self.step_ids.tolist())}
        own = None if self.step is not None else [index_of[step] for step in _column(batch.step)[number].tolist()]
        step = np.array(own, np.int64) if self.step is None else self.step[ordinal]
        return Rows(number, unit_R[number], place_R[number], ordinal, home.astype(np.int64), step)

    def check(self, cohort: Cohort) -> None:
        """Refuse a cohort that runs otherwise."""
        alike = {
            "units": np.array_equal(self.unit_ids, cohort.unit_ids),
            "tokens": np.array_equal(self.tokens, cohort.unit_tokens),
            "homes": _same(self.home, cohort.home),
            "steps": self.num_steps == cohort.num_steps and self.dropped == cohort.dropped,
            "units in steps": cohort.step is None or self.step is None or np.array_equal(self.step, cohort.step),
        }
        if wrong := [name for name, one in alike.items() if not one]:
            raise CertificationError(f"{' and '.join(wrong)} of a part are not what a second count gives")


@dataclass(frozen=True, slots=True, eq=False)
class Census:
    """Everybody in a trace.

    Parameters
    ----------
    place_of
        By name: the number of the unit, or of its step and itself; in ascending order.
    tokens, contexts
        Of each, and the sum over them of 2 x position + 1, `[I]`; of counts as of whole sequences.
    rosters
        The fitted part, then the one held out where there is one.
    """

    source: Source
    place_of: dict[Name, int]
    tokens: Numbers
    contexts: Numbers
    rosters: list[Roster]

    def rows(self) -> Iterator[tuple[TokenBatch | CountTable, Numbers, Numbers]]:
        """Batches or tables of the trace, with the unit of each row and its place, `[R]`."""
        for batch, names_RN in self.source.named(layers=True):
            place_R = np.array([self.place_of[tuple(name)] for name in names_RN.tolist()], np.int64)
            yield batch, names_RN[:, -1], place_R


def take_census(source: Source, *, seed: int, fraction: float, num_devices: int, samples_per_step: int) -> Census:
    """Everybody in a trace, from its scalar columns, and who runs when and where in every part."""
    seen, known, by_step = _Seen(), source.trace.known, source.by_step
    for batch, names_RN in source.named(layers=False):
        seen.add(batch, names_RN)
    names, of_counts = sorted(seen.tokens), isinstance(source.trace, CountTrace)
    if of_counts:
        seen.count_tokens(source.trace.meta.model.top_k, whole=by_step)
    by_sample = by_step and not ("step" in known and len({sample for _, sample in names}) == len(names))
    fitted_I = np.array([_hash(f"{seed}:{name[by_sample]}") < int(fraction * 2**64) for name in names])
    ranked = by_step or not of_counts
    chosen = [np.flatnonzero(part_I).tolist() for part_I in (fitted_I, ~fitted_I) if part_I.any()]
    return Census(
        source,
        {name: place for place, name in enumerate(names)},
        np.array([seen.tokens[name] for name in names], np.int64),
        np.array([seen.contexts[name] for name in names], np.int64),
        [
            seen.roster(names, members, num_devices, samples_per_step, by_step=by_step, ranked=ranked)
            for members in chosen
        ],
    )


class _Seen:
    """Tokens, contexts, pairs, ranks and steps of every unit, gathered in one pass over the scalar columns."""

    def __init__(self) -> None:
        self.tokens, self.contexts, self.pairs = Counter[Name](), Counter[Name](), Counter[tuple[Name, int]]()
        self.rank, self.steps, self.highest = dict[Name, int](), defaultdict[Name, set[int]](set), -1

    def add(self, batch: TokenBatch | CountTable, names_RN: Numbers) -> None:
        """Note the rows of a batch or a table."""
        names = [tuple(name) for name in names_RN.tolist()]
        if isinstance(batch, CountTable):
            self.tokens.update(dict.fromkeys(names, 0))
            for name, layer, pairs in zip(names, batch.layer.tolist(), batch.counts.sum(axis=1).tolist(), strict=True):
                self.pairs[name, layer] += pairs
        else:
            self.tokens.update(names)
            for name, position in zip(names, batch.position.tolist(), strict=True):
                self.contexts[name] += 2 * position + 1
        if batch.source_rank is not None:
            self.rank.update(zip(names, batch.source_rank.tolist(), strict=True))
            self.highest = max(self.highest, int(batch.source_rank.max(initial=-1)))
        if batch.step is not None:
            for name, step in {*zip(names, batch.step.tolist(), strict=True)}:
                self.steps[name].add(step)

    def count_tokens(self, top_k: int, *, whole: bool) -> None:
        """Tell tokens by the layer that counts most, a token `top_k` times; of whole samples rounded down."""
        most = Counter[Name]()
        for (name, _), pairs in self.pairs.items():
            most[name] = max(most[name], pairs)
        for name, pairs in most.items():
            self.tokens[name] = pairs // top_k if whole else -(-pairs // top_k)
            self.contexts[name] = self.tokens[name] ** 2 if whole else 0

    def roster(
        self, names: list[Name], members: list[int], size: int, each: int, *, by_step: bool, ranked: bool
    ) -> Roster:
        """A part as it runs on `size` devices, in derived steps of `each` units."""
        ordinal = np.arange(len(members))
        home, step, whole = ordinal % size, ordinal // each, max(len(members) // each, 1)
        step[step >= whole] = -1
        recorded = ranked and self.highest + 1 == size
        step_ids = sorted({one for place in members for one in self.steps[names[place]]})
        if recorded and by_step:
            home = np.array([self.rank[names[place]] for place in members])
        if step_ids and by_step:
            step = np.searchsorted(step_ids, [names[place][0] for place in members])
        return Roster(
            np.array(members, np.int64),
            np.array(members if by_step else [names[place][0] for place in members], np.int64),
            np.array([self.tokens[names[place]] for place in members], np.int64),
            None if recorded and not by_step else home,
            None if step_ids and not by_step else step,
            np.array(step_ids, np.int64),
            len(step_ids) or whole,
        )


def _same(one: Numbers | None, other: Numbers | None) -> bool:
    return (one is None) == (other is None) and np.array_equal(one, other)  # type: ignore[arg-type]


def _column(values: NDArray[Any] | None) -> NDArray[Any]:
    """A column that was found filled."""
    assert values is not None
    return values


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)
