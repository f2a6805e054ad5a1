"""Steps: the tokens that run at once, and how a part of a trace fills them where no steps were recorded.

In prefill and training a step is so many samples, or so many tokens of whole samples: samples stand in a row, which is
cut after every so many tokens, and a sample is in the step that its first token falls into. In decode a step is one
token of each of C concurrent sequences: the sequences of a part, one after another, are cut into C lanes of equal
length, and iteration i takes the i-th token of every lane, so that a sequence enters a lane as the one before it ends.
Where a part has fewer sequences than lanes, a sequence is in several of them, at different tokens. What fills no step,
or lane, at the end is left out; a part of less than one step is one, scaled up.

Steps that are few, or of the same sequences, are no sample to resample: a part is then counted by blocks of its steps,
and other steps are drawn from these. The blocks of an iteration are groups of lanes side by side, which hold the same
sequences in every iteration.

Legend: U units; T tokens; D devices; B steps; M blocks, as many in every step; R draws.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...solvers.arrays import Floats, Ints

FEW = 8  # steps, or blocks, whose resampling says little
BLOCKS = 64  # of a part with few steps, about
ITERATIONS, GROUPS = 16, 16  # of decode: iterations that are counted, and groups of lanes
DRAWS, EACH = 800, 8  # steps drawn from blocks; of lanes, iterations of the same ones


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of tokens that a part's steps consist of, from which other steps are drawn."""

    tokens: Floats  #: Of each block, `[M]`, those of a step in a row
    num_steps: int
    scale: float = 1.0  #: A step over what there is of it, in a part that holds less than one
    lanes: bool = False  #: Whether block g of every step is of the same sequences

    @property
    def per_step(self) -> int:
        """Blocks of a step."""
        return len(self.tokens) // self.num_steps

    @property
    def steps(self) -> Floats:
        """Number of times that each block is in each step, `[B, M]`."""
        return np.kron(np.eye(self.num_steps), np.full(self.per_step, self.scale))

    @property
    def tokens_per_step(self) -> float:
        """Mean over steps."""
        return self.scale * float(self.tokens.sum()) / self.num_steps

    @property
    def each(self) -> int:
        """Steps of a draw."""
        return min(self.num_steps, EACH) if self.lanes else 1

    @property
    def spread(self) -> float:
        """Standard error of the mean over a part's steps, as a multiple of that of one drawn step."""
        return 1.0 if self.lanes else float(self.num_steps**-0.5)

    def draws(self, seed: int) -> Floats:
        """Steps drawn with replacement, each with the tokens of a mean step, `[R, M]`; none where blocks are too few.

        With lanes, all steps of a draw take the same lanes; without, a draw is one step of blocks from all steps. Two
        lanes are enough: the steps that would be resampled instead are of the same sequences.
        """
        kept, size = np.flatnonzero(self.tokens), self.per_step
        if size < 2 if self.lanes else len(kept) < FEW:
            return np.zeros((0, len(self.tokens)))
        rng, times = np.random.default_rng(seed), np.zeros((DRAWS // self.each, self.each, len(self.tokens)))
        for draw in times:
            if self.lanes:
                drawn = np.bincount(rng.integers(size, size=size), minlength=size)
                for row, step in zip(draw, rng.permutation(self.num_steps), strict=False):
                    row[step * size : (step + 1) * size] = drawn
            else:
                np.add.at(draw[0], kept[rng.integers(len(kept), size=size)], 1)
        times_RM = times.reshape(-1, len(self.tokens))
        return np.asarray(times_RM * (self.tokens_per_step / (times_RM @ self.tokens))[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """Lanes of concurrent sequences: in a row of all tokens of a part, each has `length` of them, one an iteration."""

    first: Ints  #: Position of each unit's first token, `[U]`
    offset: Ints  #: Tokens before each unit's first, `[U]`
    length: int
    number: int
    devices: int
    iterations: Ints  #: Those that are counted, ascending
    groups: int  #: Groups of lanes, each a block of every iteration

    @classmethod
    def of(cls, first: Ints, span: Ints, concurrency: int, devices: int) -> Self:
        """The lanes of units that begin at a position and span so many, `[U]`."""
        total = int(span.sum())
        length, number = max(total // concurrency, 1), min(concurrency, total)
        counted = np.unique(np.linspace(0, length - 1, ITERATIONS).round().astype(np.int64))
        return cls(first, np.cumsum(span) - span, length, number, devices, counted, min(GROUPS, number))

    def place(self, ordinal: Ints, position: Ints) -> tuple[Ints, Ints]:
        """The block of each token, -1 where its iteration is not counted, and its home, `[T]`: lanes go in turn."""
        lane, iteration = np.divmod(self.offset[ordinal] + position - self.first[ordinal], self.length)
        at = np.minimum(np.searchsorted(self.iterations, iteration), len(self.iterations) - 1)
        counts = (self.iterations[at] == iteration) & (lane < self.number)
        return np.where(counts, at * self.groups + self._group(lane), -1), lane % self.devices

    def blocks(self, concurrency: int, density: float) -> Blocks:
        """The blocks of as many sequences, of which positions this share holds a token."""
        lanes, steps = np.bincount(self._group(np.arange(self.number)), minlength=self.groups), len(self.iterations)
        return Blocks(np.tile(density * lanes, steps), steps, concurrency / self.number / density, lanes=True)

    def _group(self, lane: Ints) -> Ints:
        """Group of each lane: lanes side by side, which share sequences, are in one."""
        return lane * self.groups // self.number


def check_spans(path: object, tokens: Ints, span: Ints) -> None:
    """Refuse sequences, `[U]`, whose positions do not follow one another, with InputError."""
    if span.sum() > 2 * tokens.sum():
        worst = int((span - tokens).argmax())
        raise InputError(
            f"{path}: a sequence of {tokens[worst]:,} tokens spans {span[worst]:,} positions; expected one after"
            " another, to run beside others: give --tokens-per-step"
        )


def filled(sizes: Ints, number: int) -> Ints:
    """The step of each unit, `[U]`, -1 in an incomplete last one: the step that its beginning falls into.

    Units of fewer than `number` in all make one step. Steps that no unit begins in, after a large one, are none.
    """
    step, complete = (np.cumsum(sizes) - sizes) // number, int(sizes.sum()) // number
    step = np.where(step < max(complete, 1), step, -1)
    return np.asarray(np.unique(step, return_inverse=True)[1] - (step < 0).any(), np.int64)


def filled_blocks(sizes: Ints, tokens: Ints, number: int) -> tuple[Ints, Blocks | None]:
    """The step of each unit as `filled` says, or, of few steps, its block with all blocks."""
    step = filled(sizes, number)
    steps, scale = int(step.max(initial=0)) + 1, max(number / max(int(sizes.sum()), 1), 1.0)
    if steps >= FEW:
        return step, None
    units, kept = np.bincount(step[step >= 0], minlength=steps), step >= 0
    each = min(-(-BLOCKS // steps), int(units.max(initial=1)))
    place = np.arange(len(step)) - np.searchsorted(np.where(kept, step, steps), step)
    block = np.where(kept, step * each + place * each // units[step], -1)
    return block, Blocks(np.bincount(block[kept], tokens[kept], steps * each).astype(np.float64), steps, scale)


def mixed_rows(weights: Floats, rows: NDArray[Any]) -> NDArray[Any]:
    """Weighted sums of rows, `[B, M]` of `[M, ...]`; whole numbers are rounded to whole ones."""
    mixed = (weights @ rows.reshape(len(rows), -1).astype(np.float64)).reshape(len(weights), *rows.shape[1:])
    return np.rint(mixed).astype(rows.dtype) if np.issubdtype(rows.dtype, np.integer) else np.asarray(mixed)
