"""Schemas of a plan's `options`, from which its figures can be made again."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from ..errors import InputError
from ..runtime.decisions import Degree, DispatchModel, PipelineDecision, Record, Sha256, SidecarFile
from ..runtime.plan import Metric, Plan, Verdict
from ..solvers.outcome import Status
from .evaluate.step_size import FIELDS, StepSize, Use, size_of

MAX_SECONDS = 1e12  # of one figure: sums over all chunks of a layer stay finite

Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Ordinal = Annotated[int, Field(ge=0)]
Reason = Annotated[str, Field(max_length=256)]
Refined = Literal["sum", "steps", "robust"]
By = Literal["published"] | Refined  # what a placement of eplb is made by
TimedMetric = Literal["step_s", "experts_s"]
Currency = Literal["step_s", "experts_s", "balance"]
Ended = Literal[Status.FEASIBLE, Status.TIME_LIMIT, Status.INTERRUPTED]
NEAR = 1.02  # of the best: as good

StepNumber = Annotated[int, Field(ge=1, lt=2**31)]
Share0 = Annotated[float, Field(ge=-1e-9, le=1 + 1e-9)]  # or none, up to rounding


class Options(Record):
    """Options that a plan keeps under `key`."""

    key: ClassVar[str]

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Read them of a plan; `InputError` where values are missing or wrong."""
        try:
            return cls.model_validate(dict(plan.options.get(cls.key, {})))
        except ValidationError as error:
            words = f"{error.error_count()} values missing or wrong; re-run solve"
            raise InputError(f"options.{cls.key}: {words}") from error


class Replanned(Record):
    """Cost of replacing the plan in force, and the gain on the judging part."""

    plan_sha256: Sha256  #: Of the plan in force
    #: experts_moved, experts_held: experts that a device is sent, and all that devices hold, over all layers
    experts_moved: int = Field(ge=0)
    experts_held: int = Field(ge=1)
    bytes_moved: int | None  #: None where the sizes of the model are not known
    horizon_tokens: float | None
    verdict: Verdict  #: Whether there is less than under the plan in force, called `previous`
    #: After so many tokens the copies saved have moved as much less; None where none are saved, or sizes not known
    paid_back_tokens: float | None

    @property
    def pays(self) -> bool:
        """Check whether the plan in force is better replaced than kept."""
        return self.experts_moved > 0 and self.verdict.value == "benefit"


class StageHops(Record):
    """The shares of transitions (or of a layer's pairs) between and inside nodes after a stage of exflow's search."""

    name: Literal["nodes", "devices", "joint"]
    inter_hops: Share0
    intra_hops: Share0


class Cap(Record):
    """Cap on the load of a device in a layer, over the mean, and its cost."""

    max_load: float = Field(ge=1)
    #: objective_without, highest_without: what a shorter search without the cap reached, and the most load of a device
    #: in any layer there
    objective_without: float
    highest_without: float = Field(ge=1 - 1e-9)


class Search(Record):
    """The search of exflow."""

    objective: Literal["hops", "copies"]  #: What it kept together: the exflow flag `--objective`
    bound: Literal["simple", "thorough"]
    #: proof, simple: of a thorough bound: the file that proves it, and why it is simple nonetheless, by "device" or
    #: "node"
    proof: SidecarFile | None = None
    simple: Mapping[str, Reason] = {}
    stages: tuple[StageHops, ...]  #: Of two levels of links: nodes first, the devices inside, both at once
    cap: Cap | None  #: None where there was none, or where the search was interrupted


class Trial(Record):
    """A placement by all but one of a few parts of the fitted units, judged on that one, beside EPLB as published.

    Each part in turn; means over layers (of all or some) and steps.
    """

    by: Refined  #: What is refined: loads together, steps, or resampled steps beside them
    #: balance, published: its own balance, and that of EPLB as published in the same layers
    balance: float = Field(ge=1 - 1e-9)
    published: float = Field(ge=1 - 1e-9)
    #: Lower end of published - balance, over layers: by chance above 0 in 1 % of choices, shared by the candidates
    low: float


class Choice(Record):
    """Placements of eplb tried on parts of the fitted units, and why none was where nothing was tried."""

    candidates: tuple[Trial, ...] = ()
    reason: Reason = ""

    @property
    def chosen(self) -> By:
        """The candidate whose gain is surely highest; EPLB as published where none surely gains."""
        best = max(self.candidates, key=lambda one: one.low, default=None)
        return best.by if best is not None and best.low > 0 else "published"


class Candidate(Record):
    """A number of redundant experts per layer, and its figures where numbers are weighed."""

    redundant: int = Field(ge=0)
    slots: int = Field(ge=1)  #: Of each device
    balance: float = Field(ge=1 - 1e-9)
    balance_p95: float = Field(ge=1 - 1e-9)
    #: Predicted of a step, or of its experts (`Redundancy.metric`); None without a profile
    seconds: float | None = Field(ge=0)
    #: Of the experts of all layers on a device; None where the sizes of the model are not known
    memory_bytes: int | None


class Redundancy(Record):
    """Numbers of redundant experts weighed against each other, and the metric."""

    metric: TimedMetric | Literal["balance"]  #: What the fewest within 2 % of the best were chosen by
    held_out: bool  #: Whether they were weighed on a part of the fitted units that they were not placed by
    candidates: tuple[Candidate, ...] = Field(min_length=1)

    @property
    def chosen(self) -> Candidate:
        """The one with the fewest whose metric is within 2 % of the best."""
        figures = [one.balance if self.metric == "balance" else one.seconds or 0.0 for one in self.candidates]
        good = [one for one, figure in zip(self.candidates, figures, strict=True) if figure <= NEAR * min(figures)]
        return min(good, key=lambda one: one.redundant)


class Member(Record):
    """A trace of a mixture; weights sum to 1."""

    path: str
    sha256: Sha256
    weight: float = Field(gt=0, le=1)


class PlacementOptions(Options):
    """Record of how the placement was decided."""

    key = "placement"

    strategy: str
    dispatch_model: DispatchModel
    method: str | None
    backend: str
    time_limit_s: float
    #: search, replanned: by exflow, and where it replaces another
    search: Search | None = None
    replanned: Replanned | None = None
    #: groups, dead, pins, quantile: as asked for; see `planner.request`
    groups: Literal["split", "whole"] = "split"
    dead: tuple[Ordinal, ...] = ()
    pins: tuple[tuple[Ordinal, Ordinal], ...] = ()
    quantile: float | None = Field(None, gt=0, le=1)
    #: choice, redundancy, mixture: of eplb; figures of a mixture are weighted means over its traces
    choice: Choice | None = None
    redundancy: Redundancy | None = None
    mixture: tuple[Member, ...] = ()


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


class SamplePolicyOptions(Options):
    """Record of how samples were re-homed, and of the most that this could save."""

    key = "sample_policy"

    #: What crosses: a copy a token and distinct device, or, where only counts are known, one a token-expert pair
    copies: Literal["devices", "pairs"]
    #: blind_copies, least_copies: copies a fitted step between nodes (on one node: between devices) in both exchanges
    #: around the layers' ends, next layers known: of samples dealt out blindly, and the fewest that any homes have
    #: (`solvers.netmoe.locality`)
    blind_copies: float = Field(ge=0)
    least_copies: float = Field(ge=0)
    #: What the plan has less of its verdict's metric than samples dealt by length alone, paired over steps
    over_dealt: Metric | None = None
    #: The same of the best of NetMoE's methods, where attention counts
    over_netmoe: Metric | None = None
    asked: bool = False  #: Whether the method was asked for
    #: Where exchanges are timed and no method was asked for: of each method that was tried, the seconds of all timed
    #: parts of a fitted step. The plan has the fastest.
    tried_s: Mapping[str, Annotated[float, Field(ge=0)]] = {}

    @property
    def locality_index(self) -> float:
        """No homes save more than this share of the blind copies."""
        return 1 - self.least_copies / self.blind_copies if self.blind_copies else 0.0


class WayRecord(Record):
    """Record of a way to send rows to other devices, on one part; shares are of all rows sent as they are."""

    name: str
    rows_saved: Share0
    far_saved: Share0  #: Of rows to other nodes
    bytes_saved: Annotated[float, Field(le=1)] | None  #: None where the sizes of the model are not known
    pairs_saved: Share0  #: Of token-expert pairs, which nobody computes
    layers_saved: tuple[Share0, ...]  #: Of rows, by layer
    #: error, bits: |y - y'| / |y| of the outputs of MoE layers, mean over layers, and bits per token above rows as they
    #: are, with intervals over samples; None: not known
    error: Metric | None = None
    bits: Metric | None = None


class CondensedPart(Record):
    """Record of the ways on one part of a trace in complete steps; the first is the plan's."""

    num_samples: int = Field(ge=1)
    num_steps: int = Field(ge=1)
    tokens_per_step: float = Field(ge=0)
    rows_per_step: float = Field(ge=0)  #: To other devices in a dispatch, all layers, sent as they are
    loss_bits: float | None = None  #: Bits per token with rows as they are; None: not known
    ways: tuple[WayRecord, ...] = Field(min_length=1)


class CondensationOptions(Options):
    """Record of how rows were condensed, and of what is known of it."""

    key = "condensation"

    evidence: Literal["hidden states", "model"]
    model: str | None = None  #: What told the loss, as asked for
    text_sha256: Sha256 | None = None
    #: most_bits, most_error: what the threshold was chosen to keep on the fitted samples
    most_bits: float | None = None
    most_error: float | None = None
    fit: CondensedPart
    held_out: CondensedPart | None

    @property
    def judging(self) -> CondensedPart:
        """The part that judges."""
        return self.held_out or self.fit


class RuleRecord(Record):
    """Record of what a rule did on the steps that judge."""

    changes: int = Field(ge=0)  #: Of a layer's placement
    violations: int = Field(ge=0)  #: Changes that cost more than they save within the horizon on what was seen
    unpaid: int = Field(ge=0)  #: Changes that cost more than they saved while they held, within the horizon
    experts_moved: int = Field(ge=0)
    planning_s: Seconds  #: CPU seconds of all decisions


class RebalancingOptions(Options):
    """Record of how replicas were placed, and when they follow the load."""

    key = "rebalancing"

    slots: int = Field(ge=1)  #: Of each device
    horizon: float | None = Field(gt=0)  #: As asked for; None: the best of those tried
    timed: bool  #: Whether it decides by seconds; else by balance alone
    #: Mean of what decides, seconds of a layer or max/mean load, on the fitted steps, by what was tried
    tried: Mapping[str, float] = {}
    followed: Mapping[str, RuleRecord] = {}  #: By contender


class Tried(Record):
    """A candidate of auto, decided by a part of the fitted units, and its figures on the part that judges."""

    parts: tuple[str, ...] = Field(min_length=1)  #: Its parts by name, in the order they were decided
    decisions: tuple[str, ...]  #: What it decides
    dispatch_model: DispatchModel
    #: inner, has_interval: lower end of its gain over today, a share, on the fitted units that did not decide it, and
    #: whether there is one; else the gain
    inner: float
    has_interval: bool
    gain: float  #: The gain itself there
    listed: bool  #: Whether the table shows it: the best of those that differ in replicas alone
    share: Metric  #: The same on the part that judges
    engines: tuple[str, ...]  #: Engines whose files carry all of it
    #: metrics, today: its figures there, and today's beside it
    metrics: Mapping[str, float]
    today: Mapping[str, float]

    @property
    def name(self) -> str:
        """Name on a screen."""
        return " + ".join(self.parts)


class AutoOptions(Options):
    """Record of what auto tried, the chosen candidate first, in its figures as solved anew."""

    key = "auto"

    engine: str | None  #: What must be able to carry it out, where asked for
    metric: Currency  #: What candidates are compared by
    tried: tuple[Tried, ...] = Field(min_length=1)
    refused: Mapping[str, str]  #: Why parts could not be tried, by name
    status: Ended = Status.FEASIBLE  #: Whether all was tried, or the best was kept at the time limit or at Ctrl-C

    @model_validator(mode="after")
    def _compared(self) -> Self:
        if any(self.metric not in figures for one in self.tried for figures in (one.metrics, one.today)):
            raise ValueError(f"a candidate lacks {self.metric}, by which all are compared")
        return self

    @property
    def listed(self) -> list[Tried]:
        """The candidates that the table shows beside the chosen one."""
        return [one for one in self.tried[1:] if one.listed]


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
