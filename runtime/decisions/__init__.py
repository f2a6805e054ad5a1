"""Decisions that a plan may hold: which expert is where and when that changes, how layers are cut, where samples go.

A new kind of decision is a subclass of `Decision` and a row of `DECISIONS`: plans check it, hash it and take its files
along without naming it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic_core import to_json

from ...errors import InputError
from ...files import validated
from ...profilers.cluster import Cluster
from ...traces.model import ModelSpec
from ..wire import Wire
from .condensation import CondensationDecision
from .decision import DISPATCH_MODELS, TRAINED, WIRED, Decision, DispatchModel, Record, Sha256, SidecarFile
from .pipeline import SHARE_DIGITS, ChunkShares, Degree, PipelineDecision, boundaries
from .placement import PlacementDecision
from .rebalancing import RebalancingDecision
from .sample_policy import SamplePolicyDecision

__all__ = [
    "DECISIONS",
    "DISPATCH_MODELS",
    "SHARE_DIGITS",
    "TRAINED",
    "WIRED",
    "ChunkShares",
    "CondensationDecision",
    "Decision",
    "Decisions",
    "Degree",
    "DispatchModel",
    "PipelineDecision",
    "PlacementDecision",
    "RebalancingDecision",
    "Record",
    "SamplePolicyDecision",
    "Sha256",
    "SidecarFile",
    "boundaries",
    "sidecars_in",
]


class Decisions(Record):
    """Decisions of a plan; one that is absent is not written, so that new kinds leave old plans their hash."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": False})

    placement: PlacementDecision | None = None
    pipeline: PipelineDecision | None = None
    sample_policy: SamplePolicyDecision | None = None
    rebalancing: RebalancingDecision | None = None
    condensation: CondensationDecision | None = None
    #: How tokens travel; None in old plans, where `Plan.dispatch_model` finds it in the options
    dispatch: DispatchModel | None = None
    wire: Wire | None = None  #: The form in which hidden vectors travel; None: as they are

    @property
    def made(self) -> tuple[Decision, ...]:
        """The decisions made, in the order of their kinds."""
        return tuple(decision for _, decision in self if isinstance(decision, Decision))

    @property
    def names(self) -> tuple[str, ...]:
        """The keys of the decisions made."""
        return tuple(decision.key for decision in self.made)

    def check(self, model: ModelSpec, cluster: Cluster, dispatch_model: DispatchModel) -> None:
        """Refuse decisions that fit neither the model and the cluster nor the dispatch model.

        Raises
        ------
        InputError
            What does not fit.
        """
        for decision in self.made:
            decision.check(model, cluster)
        if self.condensation is not None and self.pipeline is not None and self.pipeline.capacity_factor is not None:
            raise InputError(
                "a fixed capacity beside condensation: buffers hold a row for every copy; take one of them"
            )
        if self.wire is not None and dispatch_model != WIRED:
            raise InputError(f"{self.wire} rows beside {dispatch_model} dispatch; expected {WIRED}")
        if not self.dispatch_models:
            raise InputError(f"{' and '.join(self.names)}, which no dispatch model carries out together; take one")
        if beside := [decision.key for decision in self.made if dispatch_model not in decision.dispatch_models]:
            expected = " or ".join(self.dispatch_models)
            raise InputError(f"{' and '.join(beside)} beside {dispatch_model} dispatch; expected {expected}")

    @property
    def dispatch_models(self) -> tuple[DispatchModel, ...]:
        """Dispatch models under which all decisions can be carried out."""
        return tuple(
            model for model in DISPATCH_MODELS if all(model in decision.dispatch_models for decision in self.made)
        )

    @model_validator(mode="after")
    def _of_registered_kinds(self) -> Self:
        """Take decisions of kinds that were registered, and refuse any other key."""
        others = self.__pydantic_extra__ or {}
        for key, value in others.items():
            if key not in DECISIONS:
                raise ValueError(f"decisions.{key:.40}; this moeplan knows {', '.join(DECISIONS)}, dispatch and wire")
            if not isinstance(value, DECISIONS[key]):
                others[key] = DECISIONS[key].model_validate_json(to_json(value), strict=True)
        return self

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: decision for name, decision in write(self).items() if decision is not None}


# Every kind by its key; one that is added here needs no field of `Decisions`.
DECISIONS: dict[str, type[Decision]] = {
    kind.key: kind
    for kind in (PlacementDecision, PipelineDecision, SamplePolicyDecision, RebalancingDecision, CondensationDecision)
}


def sidecars_in(part: object) -> Iterator[SidecarFile]:
    """The files beside a plan that a part of it names, at any depth."""
    if isinstance(part, SidecarFile):
        yield part
    elif isinstance(part, Mapping) and set(part) == set(SidecarFile.model_fields):
        yield validated(SidecarFile, dict(part), source="plan", what="the name of a file beside it")
    elif isinstance(part, BaseModel):
        yield from sidecars_in(dict(part))
    elif isinstance(part, Mapping):
        for value in part.values():
            yield from sidecars_in(value)
    elif isinstance(part, (list, tuple)) and not (part and isinstance(part[0], int)):  # tables of ids are large
        for item in part:
            yield from sidecars_in(item)
