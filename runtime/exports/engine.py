"""An engine that takes files of a plan: what it is asked and answers, and the rules of its rows of expert ids.

Legend: E experts; R redundant slots; P = E + R slots of a layer; D devices (expert-parallel ranks).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...solvers.placement import BY_STEP
from ...solvers.replicas import ReplayRule
from ...traces.model import ModelSpec
from ..plan import Plan

SIDECAR = "moeplan.json"  # beside the files: what they are of, and for what
MAX_BYTES = 8 * 2**20  # of a JSON file; 61 layers of 288 slots take 85 kB
PERMUTE = (
    "a plan without replicas (moeplan solve --strategy eplb --redundant 0) goes into the checkpoint: moeplan apply PLAN"
    " --checkpoint MODEL_DIR -o OUT_DIR"
)
MOST_NAMED = 4  # ids named in a line
MOST_ID = 2**63


@dataclass(frozen=True, slots=True)
class Exported:
    """The files that carry a plan into an engine, and how it is started with them."""

    files: Mapping[str, str]  #: Path inside the directory to text
    command: str  #: To paste, in the engine's own environment; `MODEL`, `NODE_RANK` and `HEAD` are the reader's
    conditions: tuple[str, ...]  #: When the engine ignores the files, refuses them or gains nothing, a sentence each
    replica_rule: str | None = None  #: How the engine then chooses among an expert's replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Model and devices that a file is validated for."""

    model: ModelSpec
    model_type: str | None = None  #: Of the model's config.json; None: not known
    #: num_devices, redundant: expert-parallel ranks, and slots beyond the experts; None: what needs them is not
    #: checked, or read off the file
    num_devices: int | None = None
    redundant: int | None = None


@dataclass(frozen=True, slots=True)
class Lack:
    """Gap of an engine: what it lacks for some models, so that it cannot carry a placement for them."""

    what: str  #: As in "no EPLB"
    so: str  #: What it does with the files
    models: Mapping[str, str]  #: Name of a family by the model type of its config.json

    def family(self, model: ModelSpec, model_type: str | None) -> str | None:
        """The family of a model among those of `models`."""
        return family_of(self.models, model, model_type)


class Engine(Protocol):
    """An engine: its files and their rules."""

    name: str
    version: str  #: The one whose source was read for this
    replica_rule: ReplayRule | None  #: How it chooses among an expert's replicas; None where it takes no placement
    #: Families for which it can split every step exactly instead (rule lp), by the model type of their config.json
    splits: Mapping[str, str]
    fills: bool  #: Whether it can send shared experts where there is room (waterfill)
    file: str  #: The file of a directory that it is told of
    carries: frozenset[str]  #: The decisions that its files carry
    trains: bool  #: Whether it trains models, too; else it serves them
    lacks: tuple[Lack, ...]  #: Why it cannot serve some models under a plan
    runs_on: str  #: Devices that it needs where these are no GPUs; else empty

    def export(self, plan: Plan, model: ModelSpec, directory: Path, rule: str | None) -> Exported:
        """The files of a plan, which will lie in `directory`; replicas are chosen by a `rule`, as `rule_of` has it.

        Raises
        ------
        UsageError
            The engine cannot carry the plan out, by name of what it cannot.
        """

    def findings(self, path: Path, expected: Expected) -> Iterator[str]:
        """Faults that the engine would refuse in a file, or take and do wrong, one line each.

        Raises
        ------
        InputError
            It cannot be read as a file of this kind at all.
        """


def titled(engine: Engine) -> str:
    """Name of an engine for a screen, with the devices that it needs where these are no GPUs."""
    return f"{engine.name} ({engine.runs_on})" if engine.runs_on else engine.name


def family_of(models: Mapping[str, str], model: ModelSpec, model_type: str | None) -> str | None:
    """The family of a model, by its type where that is known, else by the first letters of its name."""
    if model_type is not None:
        return models.get(model_type)
    own = _letters(model.name.rpartition("/")[2])
    named = (name for kind, name in models.items() if own.startswith((_letters(kind), _letters(name))))
    return next(named, None)


def rule_of(engine: Engine, plan: Plan, model_type: str | None = None) -> str | None:
    """Rule by which an engine chooses among an expert's replicas under a plan: its own, or the exact split."""
    placement = plan.placement
    if placement is None or placement.replica_rule not in BY_STEP:
        return engine.replica_rule
    return "lp" if family_of(engine.splits, plan.model, model_type) else engine.replica_rule


def unserved(engine: Engine, model: ModelSpec, model_type: str | None = None) -> str:
    """Why an engine is known not to carry a placement for a model; empty where nothing is known against it."""
    return next((f"{lack.what} for {name}" for lack, name in _lacks(engine, model, model_type)), "")


def model_findings(engine: Engine, expected: Expected) -> Iterator[str]:
    """Why the engine's files are of no use for the model, whatever they hold."""
    for lack, name in _lacks(engine, expected.model, expected.model_type):
        yield f"{name} has {lack.what} in {engine.name} {engine.version}, which {lack.so}; {PERMUTE}"


def row_findings(rows: Mapping[str, Any], expected: Expected, *, width: int | None = None) -> Iterator[str]:
    """Faults of rows, by the name of their layer.

    Parameters
    ----------
    width
        P; None: that of the expected redundancy, else of the first row.
    """
    if width is None and expected.redundant is not None:
        width = expected.model.num_experts + expected.redundant
    if width is None:
        width = next((len(row) for row in rows.values() if isinstance(row, list)), expected.model.num_experts)
    yield from _of_slots(width, expected)
    for name, row in rows.items():
        yield from _of_row(name, row, expected, width)


def shown(value: Any) -> str:
    """A value of a foreign file, short enough for a line."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and abs(value) > MOST_ID:  # whose digits may be too many to print
        return "a number out of all range"
    return repr(value[:40] if isinstance(value, str) else value)[:60]


def _lacks(engine: Engine, model: ModelSpec, model_type: str | None) -> Iterator[tuple[Lack, str]]:
    for lack in engine.lacks:
        if name := lack.family(model, model_type):
            yield lack, name


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _of_slots(num_slots: int, expected: Expected) -> Iterator[str]:
    """Faults of P slots per layer."""
    num_experts, num_devices = expected.model.num_experts, expected.num_devices
    if expected.redundant is not None and num_slots != num_experts + expected.redundant:
        yield (
            f"{num_slots} slots per layer; expected {num_experts + expected.redundant}: {num_experts} experts and"
            f" {expected.redundant} redundant"
        )
    if num_slots < num_experts:
        yield f"{num_slots} slots per layer for {num_experts} experts; every expert needs one"
    if num_devices is not None and num_slots % num_devices:
        yield f"{num_slots} slots per layer do not divide by {num_devices} devices"
    if num_devices is not None and num_slots > num_experts * num_devices:
        yield f"{num_slots} slots per layer on {num_devices} devices; some hold an expert twice, whichever way"


def _of_row(name: str, row: Any, expected: Expected, width: int) -> Iterator[str]:
    num_experts = expected.model.num_experts
    if not isinstance(row, list):
        yield f"{name}: {shown(row)}; expected a list of {width} expert ids"
        return
    if len(row) != width:
        yield f"{name}: {len(row)} slots; expected {width}"
        return
    if strange := [slot for slot, expert in enumerate(row) if type(expert) is not int]:
        yield f"{name}: slot {strange[0]} holds {shown(row[strange[0]])}; expected the id of an expert, an integer"
        return
    if outside := sorted({expert for expert in row if not 0 <= expert < num_experts}):
        yield f"{name}: names expert {listed(outside)}; expected 0 to {num_experts - 1}"
    if absent := sorted(set(range(num_experts)).difference(row)):
        yield f"{name}: leaves out expert {listed(absent)} ({len(absent)} of {num_experts} are nowhere)"
    if expected.num_devices is not None and width % expected.num_devices == 0:
        yield from _twice(name, row, expected.num_devices)


def _twice(name: str, row: list[int], num_devices: int) -> Iterator[str]:
    """The first device that holds an expert more than once."""
    slots = len(row) // num_devices
    for device in range(num_devices):
        held = Counter(row[device * slots : (device + 1) * slots])
        if again := sorted(expert for expert, times in held.items() if times > 1):
            yield f"{name}: device {device} holds expert {listed(again)} twice; the second is never served, or wrong"
            return


def listed(ids: list[int]) -> str:
    """Ids of experts or layers, the first of many."""
    more = f" and {len(ids) - MOST_NAMED} more" if len(ids) > MOST_NAMED else ""
    return ", ".join(map(shown, ids[:MOST_NAMED])) + more
