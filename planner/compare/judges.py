"""The judges of a comparison: the units of a trace that none of the plans was fitted to, as they run.

Legend: U units; I samples of the roll.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...profilers.cluster import Cluster
from ...traces.count_form import CountTrace
from ...traces.reader import Trace
from ...traces.split import fitted
from ..measures.survey import Cohort, survey
from ..netmoe.roll import Roll, call_roll
from ..request import Phase
from .entry import Entry

__all__ = ["Called", "Judges"]


@dataclass(frozen=True, slots=True, eq=False)
class Called:
    """Samples that a policy can move, one by one: their roll, and the places in it of those that judge, `[I]`."""

    roll: Roll
    place: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Judges:
    """The units that judge, and how many were left out because a plan was fitted to them.

    Parameters
    ----------
    seen
        Whether nothing else was left, so that plans are judged on what they were fitted to.
    called
        Where a plan moves samples: then counts are resampled over steps, else over units.
    """

    cohort: Cohort
    kind: str
    num_fitted: int
    seen: bool
    called: Called | None = None

    @classmethod
    def of(
        cls,
        source: Trace | CountTrace,
        entries: Sequence[Entry],
        cluster: Cluster,
        *,
        phases: Sequence[Phase],
        samples_per_step: int,
    ) -> Self:
        """The units of a trace of these phases; all of them where every one was fitted.

        Raises
        ------
        UsageError
            A plan that moves samples, on a trace without, or of counts beside placements; pipelines on counts.
        """
        if isinstance(source, CountTrace):
            _check_counts(source, entries)
        size = {"num_devices": cluster.num_devices, "samples_per_step": samples_per_step}
        if any(entry.policy for entry in entries):
            roll = call_roll(source, phases=phases or None)
            unseen_I = _unseen(roll, entries, source.sha256)
            place = np.flatnonzero(unseen_I | ~unseen_I.any())
            called = Called(roll, place)
            return cls(roll.cohort(place, **size), "sample", int((~unseen_I).sum()), not unseen_I.any(), called)
        surveyed = survey(source, phases=phases or None)
        unseen_U = np.ones(len(surveyed.unit_ids), np.bool_)
        for split in (entry.split_of(source.sha256) for entry in entries):
            if split is not None:
                unseen_U &= ~surveyed.fitted(seed=split.seed, fraction=split.fit_fraction)
        cohort = surveyed.cohort(unseen_U | ~unseen_U.any(), **size)
        return cls(cohort, surveyed.kind, int((~unseen_U).sum()), not unseen_U.any())

    @property
    def walked(self) -> Cohort:
        """The units as tokens find theirs: ascending, each in one step.

        Raises
        ------
        UsageError
            A sample runs in several steps, and plans move samples.
        """
        if self.called is None:
            return self.cohort
        one, order = self.cohort, np.argsort(self.cohort.unit_ids, kind="stable")
        assert one.home is not None
        assert one.step is not None
        if (np.diff(one.unit_ids[order]) == 0).any():
            raise UsageError(
                "samples run in several steps here, and one plan moves them: compare it apart from placements"
            )
        return replace(
            one,
            unit_ids=one.unit_ids[order],
            unit_tokens=one.unit_tokens[order],
            home=one.home[order],
            step=one.step[order],
        )


def _check_counts(trace: CountTrace, entries: Sequence[Entry]) -> None:
    """Refuse plans that counts alone cannot judge, or not together."""
    for entry in entries:
        if entry.plan.judges_pipeline:
            raise UsageError(
                f"{trace.path}: counts do not say what exchanges carry, which {entry.path} cuts into chunks; give a"
                " trace of tokens"
            )
        if bool(entry.policy) != bool(entries[0].policy):
            raise UsageError(
                f"{trace.path}: counts judge what moves samples by their copies, and placements by their loads; compare"
                f" {entries[0].path} and {entry.path} apart"
            )


def _unseen(roll: Roll, entries: Sequence[Entry], sha256: str) -> NDArray[np.bool_]:
    """Whether no plan was fitted to each sample, `[I]`; a sample policy is fitted to whole steps where it can be."""
    unseen_I = np.ones(len(roll.sample), np.bool_)
    for entry in entries:
        split = entry.split_of(sha256)
        if split is not None and entry.policy:
            unseen_I &= ~roll.fitted(seed=split.seed, fraction=split.fit_fraction)
        elif split is not None:
            unseen_I &= ~fitted(roll.sample, seed=split.seed, fraction=split.fit_fraction)
    return unseen_I
