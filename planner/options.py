"""Schemas of a plan's `options`, from which its figures can be made again."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    StrictBool,
    ValidationError,
    model_serializer,
    model_validator,
)

from ..errors import InputError
from ..runtime.decisions import Degree, PipelineDecision, Record
from ..runtime.plan import Plan
from ..solvers.replicas import ReplayRule
from .evaluate.step_size import FIELDS, StepSize, Use, size_of

MAX_SECONDS = 1e12  # of one figure: sums over all chunks of a layer stay finite

Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Ordinal = Annotated[int, Field(ge=0)]
Reason = Annotated[str, Field(max_length=256)]

StepNumber = Annotated[int, Field(ge=1, lt=2**31)]
Share0 = Annotated[float, Field(ge=-1e-9, le=1 + 1e-9)]  # or none, up to rounding


class Options(Record):
    """Options that a plan keeps under `key`."""

    key: ClassVar[str]

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Read the options of a plan; `InputError` where values are missing or wrong."""
        try:
            return cls.model_validate(dict(plan.options.get(cls.key, {})))
        except ValidationError as error:
            words = f"{error.error_count()} values missing or wrong; re-run solve"
            raise InputError(f"options.{cls.key}: {words}") from error


class StageSeconds(Record):
    """Seconds of the chunks of every MoE layer in each stage, in the order of a forward pass, mean over steps.

    A tuple a layer: a figure a chunk, or a single one where all chunks are alike. The experts' is the sum of
    all calls of a chunk in that pass.
    """

    dispatch_s: tuple[tuple[Seconds, ...], ...]
    experts_s: tuple[tuple[Seconds, ...], ...]
    combine_s: tuple[tuple[Seconds, ...], ...]


class PipelineOptions(Options):
    """Record of how the degrees were decided, and of the stages of every layer."""

    key = "pipeline"

    method: str
    max_degree: Degree
    joint: bool
    full_duplex: bool
    #: How many times as long as forward the experts compute backward; 0: no backward pass was planned
    backward: Seconds
    placement: Literal["base", "contiguous"]  #: Under which placement: that of the plan it was solved on, or contiguous
    #: What the contenders decide that the plan is held against: equal chunks, and the plan's capacity
    baselines: Mapping[str, PipelineDecision]
    a2a_ffn_overlap_degree: tuple[Degree, ...]  #: What Tutel takes, one a layer for both passes
    agreement_s: Seconds  #: Of agreeing on a layer's counts, before the first chunk of a forward pass
    #: whole, forward, backward_pass: the stages of a layer in one piece, and at the plan's degrees
    whole: StageSeconds
    forward: StageSeconds
    backward_pass: StageSeconds | None


class EvaluationOptions(Options):
    """Record of how a plan was judged: what splits, which phases count, how homes (none: counts) and steps arise.

    Derived steps are of one of three sizes: so many samples, tokens of whole samples, or concurrent sequences.
    """

    key = "evaluation"

    unit: Literal["sample", "step", "block"]
    phases: tuple[Literal["prefill", "decode", "train"], ...]
    use: Use | None = None  #: What runs; None of counts, whose phase is not known
    samples_per_step: StepNumber | None = None
    tokens_per_step: StepNumber | None = None
    concurrency: StepNumber | None = None
    as_prompts: bool = False  #: Whether decoded tokens stand for those of prompts
    home: Literal["source_rank", "ordinal", "none"]
    step: Literal["recorded", "derived"]
    engine_rule: ReplayRule | None = None  #: How an engine chooses among replicas; None: as a plan says
    #: Whether shared experts are load, where SGLang's waterfill puts them; written where so
    waterfill: StrictBool = False

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if (name, value) != ("waterfill", False)}

    @model_validator(mode="after")
    def _of_one_size(self) -> Self:
        if sum(getattr(self, name) is not None for name in FIELDS.values()) > 1:
            raise ValueError("more than one size of a step")
        return self

    @classmethod
    def use_in(cls, plan: Plan) -> Use | None:
        """Use that a plan was judged for; None where it does not say."""
        return cls.of(plan).use if cls.key in plan.options else None

    @property
    def size(self) -> StepSize | None:
        """Size of derived steps."""
        return size_of(**{name: getattr(self, name) for name in FIELDS.values()})


class SecondsOptions(Options):
    """Record of how seconds were predicted."""

    key = "seconds"

    sources: Mapping[str, str]  #: Part (and link class) to the profile's series, or the link, that times it
    missing: Mapping[str, Reason]  #: Part without seconds to the reason
    #: Metric to the largest share, over the judged contenders, of calls outside the sizes measured
    extrapolated: Mapping[str, Annotated[float, Field(ge=0, le=1)]]
    other_dtype: tuple[str, ...]  #: Parts timed in a dtype of another width than the model's
    noisy: tuple[str, ...] = ()  #: Parts whose curves were measured on a noisy machine
