"""What a replay measured, and the file beside a plan that keeps it: light, for screens and pages.

Legend: R rounds.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

import numpy as np

from ...errors import InputError
from ...files import read_json, validated, write_json
from ...profilers.measurement import median_interval
from ...profilers.origin import Environment
from ...runtime.decisions import Record, Sha256
from ...runtime.plan import FileInput, Plan

WHAT = "a replay"
MOST_NOISE = 0.1  # from which on a machine is noisy: of today's second run beside its first


@dataclass(frozen=True, slots=True)
class Span:
    """A figure and its 95 % interval: of seconds measured those of a median."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """The median of samples."""
        return cls(float(np.median(samples)), *median_interval(samples))


@dataclass(frozen=True, slots=True)
class Ran:
    """A way to run steps: seconds measured, those of the slowest rank, and predicted."""

    name: str
    #: Of a step, with an equal share of the seconds in which experts changed their owners
    step: Span
    #: exchange_s, experts_s: medians of the forward's dispatches and combines, and of its experts, each after a barrier
    exchange_s: float
    experts_s: float
    copies: float  #: Hidden vectors sent to other devices in a step, dispatch and combine
    gain: Span  #: Share of today's step that it saves, round by round
    #: step_s, exchange_s and experts_s of the MoE layers as the profile has them, none without one; and device_copies
    predicted: Mapping[str, Span]
    #: measured_s, predicted_s: seconds of the step of each round, moves before it included, `[R]`; the latter none
    #: without a profile
    measured_s: tuple[float, ...] = ()
    predicted_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Replayed:
    """Steps that were run."""

    num_tokens: int  #: Of all steps; of counts token-expert pairs, which run as tokens of their own
    steps: tuple[int, ...]  #: The step of each round, by its place among those run, `[R]`
    seen: bool  #: Whether plans were fitted to them
    backward: bool
    noise: float  #: How far today's second run of a round is from its first, as a share: the bound of its interval
    ways: tuple[Ran, ...]  #: Today's first
    doubts: tuple[str, ...] = ()  #: What the figures lack

    def verdict(self, way: Ran) -> str:
        """What a plan's gain is beside the noise, which follows."""
        if way.gain.low > self.noise:
            return "faster than today by more than the noise of"
        if way.gain.high < -self.noise:
            return "slower than today by more than the noise of"
        return "no difference from today above the noise of"

    @property
    def noisy(self) -> bool:
        """Whether the noise hides small gains."""
        return self.noise > MOST_NOISE

    @property
    def gaining(self) -> list[str]:
        """The plans whose gain is above the noise, the largest gain first."""
        above = [way for way in self.ways[1:] if way.gain.low > self.noise]
        return [way.name for way in sorted(above, key=lambda way: -way.gain.value)]

    @property
    def undecided(self) -> bool:
        """Whether some plan is neither faster nor slower than today by more than the noise."""
        return any(way.gain.low <= self.noise and way.gain.high >= -self.noise for way in self.ways[1:])

    @property
    def num_steps(self) -> int:
        """How many different steps were run."""
        return len(set(self.steps))


class Saved(Record):
    """A replay of one plan, beside today, in the file beside it."""

    schema_version: Literal[1] = 1
    moeplan_version: str
    created_at: datetime.datetime
    plan_sha256: Sha256
    trace: FileInput
    profile: FileInput | None
    environment: Environment
    replayed: Replayed


def beside(plan: Path) -> Path:
    """The file of a plan's replay."""
    return plan.with_name(f"{plan.name.removesuffix('.json')}.replay.json")


def save(
    done: Replayed,
    plans: Mapping[str, Plan],
    *,
    trace: FileInput,
    profile: FileInput | None,
    environment: Environment,
) -> list[Path]:
    """Write the replay of each plan, by its path, beside it; the files."""
    from importlib.metadata import version

    today, *ways = done.ways
    now, files = datetime.datetime.now(datetime.UTC).replace(microsecond=0), list[Path]()
    for way in ways:
        saved = Saved(
            moeplan_version=version("moeplan"),
            created_at=now,
            plan_sha256=plans[way.name].plan_sha256,
            trace=trace,
            profile=profile,
            environment=environment,
            replayed=replace(done, ways=(today, way)),
        )
        files.append(beside(Path(way.name)))
        write_json(files[-1], saved.model_dump(mode="json"))
    return files


def load(plan: Plan, path: Path) -> Saved | None:
    """The replay beside the plan at `path`; None where there is none.

    Raises
    ------
    InputError
        It is of another plan, damaged, or of another version.
    """
    file = beside(path)
    if not file.exists():
        return None
    saved = validated(Saved, json.dumps(read_json(file, what=WHAT)).encode(), source=str(file), what=WHAT)
    if saved.plan_sha256 != plan.plan_sha256:
        raise InputError(
            f"{file}: a replay of plan {saved.plan_sha256[:12]}.., {path} is {plan.plan_sha256[:12]}..; replay it anew:"
            f" moeplan replay {path} --save"
        )
    return saved
