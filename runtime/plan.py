"""The Plan: decisions, inputs, evaluation, and its JSON form.

`plan_sha256` covers `decisions`, `cluster` and `model`: what ranks must agree on before they start.
"""

import datetime
import json
import os
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from ..errors import InputError
from ..files import canonical_json, check_kind, read_json, sha256_json, validated, write_json
from ..profilers.cluster import Cluster
from ..solvers.outcome import Outcome
from ..solvers.placement import BY_STEP, Placement
from ..solvers.replicas import ReplayRule
from ..traces.model import ModelSpec
from .decisions import DISPATCH_MODELS, Decisions, DispatchModel, Record, Sha256

SCHEMA_VERSION = 1
BOUND = ("decisions", "cluster", "model")  # what plan_sha256 covers


class Split(Record):
    """The samples that were fitted: those hashed below `fit_fraction` under `seed`."""

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
    """Inputs that a plan was made from."""

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
        """The name in a verdict: "name/dispatch model"."""
        return f"{self.name}/{self.dispatch_model}"


class Part(Record):
    """The contenders on one part of the trace (fit or held out)."""

    num_samples: int = Field(ge=1)
    num_tokens: int = Field(ge=1)
    num_steps: int = Field(ge=1)
    dropped_samples: int = Field(ge=0)
    tokens_per_step: float = Field(ge=0)  #: The mean over complete steps
    contenders: tuple[Contender, ...] = Field(min_length=1)

    def lacks(self, tokens: float) -> bool:
        """Check whether the part has fewer tokens than a step of so many, whose figures are then scaled up."""
        return tokens > self.num_tokens


class Evaluation(Record):
    """The plan beside its baselines, on the fitted samples and on unseen ones."""

    fit: Part
    held_out: Part | None

    @property
    def judging(self) -> Part:
        """The part that the verdict is about."""
        return self.held_out or self.fit


class SizedGain(Record):
    """Gain at another size of a step, as a share of the baseline's figure at that size."""

    tokens_per_step: float = Field(ge=0)
    share: Metric


class Verdict(Record):
    """Answer to whether the plan pays: benefit if and only if `gain.low` is above `at_least` of the value of
    `against`, and the gain at least 1 % of that value.
    """

    value: Literal["benefit", "none"]
    metric: str
    against: str
    gain: Metric
    #: A share; above 0 where carrying the plan out costs what the metric does not hold
    at_least: float = Field(0.0, ge=0, lt=1)
    share: Metric | None = None  #: The gain over the value of `against`; None where that is 0
    sizes: tuple[SizedGain, ...] = ()  #: At smaller and larger steps, ascending, where steps are derived


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

    @property
    def dispatch_model(self) -> DispatchModel:
        """The dispatch model decided; in old plans that of the placement's options, or what the decisions need."""
        if self.decisions.dispatch is not None:
            return self.decisions.dispatch
        chosen = self.options.get("placement", {}).get("dispatch_model", "standard")
        if chosen == "standard":
            chosen = next(iter(self.decisions.dispatch_models), chosen)
        if chosen not in DISPATCH_MODELS:
            raise InputError(f"options.placement: dispatch_model {chosen!r}; expected one of {DISPATCH_MODELS}")
        model: DispatchModel = chosen
        return model

    @property
    def placement(self) -> Placement | None:
        """The placement as arrays, that of the first step where it changes; None where the plan decides none."""
        rebalancing = self.decisions.rebalancing
        decided = self.decisions.placement if rebalancing is None else rebalancing.start
        return None if decided is None else decided.placement(self.model, self.cluster)

    @property
    def judged_by(self) -> ReplayRule | None:
        """Rule by which tokens chose replicas where it was judged: an engine's, else its own; None without any."""
        if (placement := self.placement) is None or not placement.has_replicas:
            return None
        own, engines = placement.replica_rule.value, self.options.get("evaluation", {}).get("engine_rule")
        chosen: Any = own if own in BY_STEP else engines or own
        if chosen not in get_args(ReplayRule):
            raise InputError(f"options.evaluation: engine_rule {chosen!r}; expected one of {get_args(ReplayRule)}")
        rule: ReplayRule = chosen
        return rule

    @property
    def fills(self) -> bool:
        """Check whether it was judged with shared experts as load, where SGLang's waterfill puts them."""
        return self.options.get("evaluation", {}).get("waterfill") is True

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        written = self.model_dump(mode="json")
        _check_text(written)
        canonical_json(written)  # raises where a part is not finite JSON, which could not be saved
        sha256 = sha256_json({part: written[part] for part in BOUND})
        if sha256 != self.plan_sha256:
            raise InputError(
                f"decisions, cluster and model hash to {sha256[:12]}.., but plan_sha256 says"
                f" {self.plan_sha256[:12]}..; the file was changed after it was written"
            )
        self.decisions.check(self.model, self.cluster, self.dispatch_model)
        return self


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
    return parse(read_json(path, what="a plan"), str(path))


def parse(value: Any, source: str) -> Plan:
    """The plan in a decoded JSON value; `source` names it in errors."""
    check_kind(value, source=source, what="a plan")
    if value["schema_version"] != SCHEMA_VERSION:
        version = repr(value["schema_version"])[:40]
        raise InputError(f"{source}: plan of schema version {version}; this moeplan reads {SCHEMA_VERSION}")
    return validated(Plan, json.dumps(value).encode(), source=source, what="a plan")


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan as JSON, atomically."""
    write_json(path, plan.model_dump(mode="json"))
