"""Record of how rows were condensed."""

from typing import Annotated, Literal

from pydantic import Field

from ....runtime.decisions import Record, Sha256
from ....runtime.plan import Metric
from ...options import Options, Share0


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
