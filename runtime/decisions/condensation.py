"""Rows that need not travel."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ...errors import InputError
from ...profilers.cluster import Cluster
from ...traces.model import ModelSpec
from .decision import Decision, Layer


class CondensationDecision(Decision):
    """Rows for another device that need not travel, since one that is near stands for them; results change.

    How near is `tau` or `threshold`, the start of what the schedule moves.
    """

    key = "condensation"
    dispatch_models = ("standard",)
    unwritten = ("tau", "threshold", "target", "h_max", "s1", "s2", "layers", "gains")

    #: gate: gate weights times distance (times `gains`) are at most `tau`; star: cosines are at least `threshold`
    criterion: Literal["gate", "star"] = "gate"
    tau: float | None = Field(default=None, ge=0)  #: The error that a row may add; None and 0: nothing is condensed
    threshold: float | None = Field(default=None, ge=-1, le=1)
    #: share: what holds the `target`; paper: `2 h_max / (1 + exp(kappa l))` of the relative fall l of the loss
    schedule: Literal["fixed", "share", "paper"] = "fixed"
    target: float | None = Field(default=None, ge=0, lt=1)  #: Share of the rows to save
    h_max: float | None = Field(default=None, ge=-1, le=1)  #: Cosine before the loss falls; Eq. 2 of LUFFY: 0.5
    kappa: float = 1.0
    #: s1, s2: cosines of the layer before from which, and below which, this layer's are not computed (LUFFY)
    s1: float | None = Field(default=None, ge=-1, le=1)
    s2: float | None = Field(default=None, ge=-1, le=1)
    medoid: bool = False  #: Whether the row that stands for others travels as it is; else their mean does
    layers: tuple[Layer, ...] | None = None  #: Ordinals of the MoE layers that condense, ascending; None: all
    #: What errors are taken times, by layer, then expert: its gain over the norm of the residual stream; None: 1
    gains: tuple[tuple[Annotated[float, Field(ge=0)], ...], ...] | None = None

    def check(self, model: ModelSpec, _cluster: Cluster, /) -> None:
        """Refuse layers or gains of another model."""
        if self.layers is not None and (
            sorted(set(self.layers)) != [*self.layers] or max(self.layers, default=0) >= model.num_layers
        ):
            raise InputError(
                f"condensation of layers {self.layers!s:.80}; expected ascending ordinals below {model.num_layers}"
            )
        sizes = (model.num_experts,) * model.num_layers
        if self.gains is not None and tuple(map(len, self.gains)) != sizes:
            raise InputError(
                f"condensation by gains of others; expected {model.num_layers} layers of {model.num_experts} experts"
            )

    @model_validator(mode="after")
    def _of_one_rule(self) -> Self:
        """Refuse fields that the criterion and the schedule do not use, or lack."""
        star, paper, share = self.criterion == "star", self.schedule == "paper", self.schedule == "share"
        if paper and not star:
            raise ValueError("schedule paper moves a cosine; expected criterion star")
        how = f"criterion {self.criterion} under schedule {self.schedule}"
        taken = {"threshold": star and not paper, "target": share, "h_max": paper, "tau": not star, "s1": star}
        for name, takes in taken.items():
            if not takes and getattr(self, name) is not None:
                raise ValueError(f"{how} takes no {name}")
            if takes and getattr(self, name) is None and name not in ("tau", "s1"):
                raise ValueError(f"{how} needs a {name}")
        if share and (self.threshold == 1 if star else not self.tau):
            start = "cosine 1" if star else "tau 0"
            raise ValueError(f"schedule share from {start}; expected a start that condenses something")
        if (self.s1 is None) != (self.s2 is None) or (self.s1 is not None and not self.s1 > (self.s2 or 0.0)):
            raise ValueError(f"s1 {self.s1} and s2 {self.s2}; expected s1 above s2, or neither")
        return self
