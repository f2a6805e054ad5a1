"""The Plan: what was decided, from what, how good it is, and its JSON form.

`plan_sha256` covers `decisions`, `cluster` and `model`: what ranks must agree on before they start.
"""

import datetime
import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
from pydantic import Field, model_validator

from ..errors import InputError
from ..files import canonical_json, check_kind, read_json, sha256_json, validated, write_json
from ..profilers.cluster import Cluster
from ..solvers.outcome import Outcome
from ..solvers.placement import Placement
from ..traces.model import ModelSpec
from .decisions import Decisions, DispatchModel, Record, Sha256

__all__ = ["SCHEMA_VERSION", "Plan", "load", "save"]

SCHEMA_VERSION = 1
BOUND = ("decisions", "cluster", "model")  # what plan_sha256 covers


class Split(Record):
    """Which samples were fitted: those hashed below `fit_fraction` under `seed`."""

    fit_fraction: float = Field(gt=0, le=1)
    seed: int = Field(ge=0)


class TraceInput(Record):
    """The trace a plan was made from; the path informs, the hash binds."""

    path: str
    sha256: Sha256
    num_tokens: int = Field(ge=1)
    split: Split


class FileInput(Record):
    """Another file a plan was made from."""

    path: str | None = None
    sha256: Sha256


class Inputs(Record):
    """Everything a plan was made from."""

    trace: TraceInput | None = None
    profile: FileInput | None = None
    base: FileInput | None = None


class Metric(Record):
    """A measured or predicted figure with its 95 % interval, None where there is no interval."""

    value: float
    low: float | None = None
    high: float | None = None


class Contender(Record):
    """The plan or a baseline, under a dispatch model, on one part of the trace."""

    name: str
    dispatch_model: DispatchModel
    metrics: Mapping[str, Metric]

    @property
    def label(self) -> str:
        """What a verdict calls it: "name/dispatch model"."""
        return f"{self.name}/{self.dispatch_model}"


class Part(Record):
    """The contenders on one part of the trace (fit or held out)."""

    num_samples: int = Field(ge=1)
    num_tokens: int = Field(ge=1)
    num_steps: int = Field(ge=1)
    dropped_samples: int = Field(ge=0)
    contenders: tuple[Contender, ...]


class Evaluation(Record):
    """The plan beside its baselines, on what it was fitted to and on what it has not seen."""

    fit: Part
    held_out: Part | None

    @property
    def judging(self) -> Part:
        """The part that the verdict is about."""
        return self.held_out or self.fit


class Verdict(Record):
    """Whether the plan pays: benefit if and only if `gain.low` is above `at_least` of the value of `against`.

    Parameters
    ----------
    at_least
        A share; above 0 where carrying the plan out costs what the metric does not hold.
    """

    value: Literal["benefit", "none"]
    metric: str
    against: str
    gain: Metric
    at_least: float = Field(0.0, ge=0, lt=1)


class Plan(Record):
    """A plan: decisions for a cluster and a model, with their evidence."""

    schema_version: Literal[1] = 1
    moeplan_version: str
    created_at: datetime.datetime
    plan_sha256: Sha256
    strategies: tuple[str, ...]
    seed: int = Field(ge=0)
    cluster: Cluster
    model: ModelSpec
    inputs: Inputs
    decisions: Decisions
    options: Mapping[str, Mapping[str, Any]] = {}
    outcome: Mapping[str, Outcome] = {}
    evaluation: Evaluation | None = None
    verdict: Verdict | None = None

    @classmethod
    def make(cls, **fields: Any) -> Self:
        """A plan of these fields, dated, versioned and hashed."""
        from importlib.metadata import version

        bound = cls.model_construct(**fields).model_dump(mode="json", include=set(BOUND))
        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        return cls(moeplan_version=version("moeplan"), created_at=now, plan_sha256=sha256_json(bound), **fields)

    @cached_property
    def folder(self) -> Path | None:
        """Where the files that it names lie beside it; None where it was not loaded from a file."""
        return None

    @property
    def dispatch_model(self) -> DispatchModel:
        """How tokens travel: migrating under a sample policy, else what `options.placement` says, else standard."""
        chosen = self.options.get("placement", {}).get("dispatch_model", "standard")
        if self.decisions.sample_policy is not None and chosen == "standard":
            chosen = "migrating"
        if chosen not in get_args(DispatchModel):
            raise InputError(f"options.placement: dispatch_model {chosen!r}; expected one of {get_args(DispatchModel)}")
        found: DispatchModel = chosen
        return found

    @property
    def judges_pipeline(self) -> bool:
        """Whether its figures are of pipelined layers; a sample policy added later is judged on whole ones."""
        return self.decisions.pipeline is not None and self.decisions.sample_policy is None

    @property
    def placement(self) -> Placement | None:
        """The placement as arrays, None where the plan decides none."""
        decision = self.decisions.placement
        if decision is None:
            return None
        slots = decision.slots_per_device
        slots_D = np.full(self.cluster.num_devices, slots) if isinstance(slots, int) else np.array(slots, np.int64)
        lengths = {len(row) for row in decision.physical_to_logical}
        if len(lengths) != 1 or len(decision.physical_to_logical) != self.model.num_layers:
            raise InputError(
                f"placement of {len(decision.physical_to_logical)} layers with {sorted(lengths)} slots;"
                f" expected {self.model.num_layers} layers, all with the same number"
            )
        if slots_D.size != self.cluster.num_devices:
            raise InputError(
                f"placement for {slots_D.size} devices; the plan's cluster {self.cluster} has"
                f" {self.cluster.num_devices}"
            )
        table_LP = np.array(decision.physical_to_logical, dtype=np.int32)
        return Placement(table_LP, slots_D, self.model.num_experts, decision.replica_rule)

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        written = self.model_dump(mode="json")
        _check_text(written)
        canonical_json(written)  # raises where a part is not finite JSON, which could not be saved
        found = sha256_json({part: written[part] for part in BOUND})
        if found != self.plan_sha256:
            raise InputError(
                f"decisions, cluster and model hash to {found[:12]}.., but plan_sha256 says"
                f" {self.plan_sha256[:12]}..; the file was changed after it was written"
            )
        self.placement  # noqa: B018  raises where the placement breaks a rule
        self._check_decisions()
        return self

    def _check_decisions(self) -> None:
        """Refuse decisions that do not fit the model or one another."""
        pipeline, policy, num_layers = self.decisions.pipeline, self.decisions.sample_policy, self.model.num_layers
        for name, degrees in (("forward", pipeline.forward), ("backward", pipeline.backward)) if pipeline else ():
            if degrees is not None and len(degrees) != num_layers:
                raise InputError(f"pipeline of {len(degrees)} {name} degrees; expected {num_layers}, one an MoE layer")
        if policy and (sorted(set(policy.layers)) != [*policy.layers] or max(policy.layers, default=0) >= num_layers):
            raise InputError(
                f"sample_policy of layers {policy.layers!s:.80}; expected ascending ordinals below {num_layers}"
            )
        beside = [name for name in ("pipeline", "sample_policy") if name in self.decisions.names]
        if self.dispatch_model == "coherent" and beside:
            raise InputError(f"{' and '.join(beside)} beside coherent dispatch; expected standard dispatch of tokens")


def _check_text(value: Any) -> None:
    """Refuse text that a terminal would act on, anywhere in a plan."""
    if isinstance(value, str) and not all(sign.isprintable() for sign in value):
        raise InputError(f"text with unprintable characters: {ascii(value)[:80]}; a plan holds printable text only")
    if isinstance(value, dict):
        _check_text([*value, *value.values()])
    elif isinstance(value, list) and not (value and isinstance(value[0], int)):
        for item in value:
            _check_text(item)


def load(path: str | os.PathLike[str]) -> Plan:
    """The plan in a JSON file.

    Raises
    ------
    InputError
        The file is no plan, of another schema version, edited, or breaks a placement rule.
    """
    plan = parse(read_json(path, what="a plan"), str(path))
    plan.__dict__["folder"] = Path(path).parent
    return plan


def parse(value: Any, source: str) -> Plan:
    """The plan in a decoded JSON value; `source` names it in errors."""
    check_kind(value, source=source, what="a plan")
    if value["schema_version"] != SCHEMA_VERSION:
        found = repr(value["schema_version"])[:40]
        raise InputError(f"{source}: plan of schema version {found}; this moeplan reads {SCHEMA_VERSION}")
    return validated(Plan, json.dumps(value).encode(), source=source, what="a plan")


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan as JSON, atomically."""
    write_json(path, plan.model_dump(mode="json"))
