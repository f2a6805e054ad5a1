"""Record of exflow's search, and of replacing the plan in force."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from ....runtime.decisions import Record, Sha256, SidecarFile
from ....runtime.plan import Verdict
from ....traces.model import EXPERT_MATRICES, ModelSpec
from ...options import Reason, Share0


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


def paid_back_tokens(moved: int, copies: float, model: ModelSpec) -> float | None:
    """Tokens after which copies saved, so many per token and layer, weigh as much as the experts moved.

    None where none are saved, or sizes are not known.
    """
    vectors = vectors_a_move(model)
    return None if vectors is None or copies <= 0 else moved * vectors / (copies * model.num_layers)


def vectors_a_move(model: ModelSpec) -> int | None:
    """Hidden vectors that weigh as much as an expert; None where its size is not known."""
    return None if model.ffn_size is None else EXPERT_MATRICES * model.ffn_size


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
