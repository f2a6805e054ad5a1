"""The homes that rules give the samples of a cohort, step by step and layer by layer, as a run would.

Legend: I samples of a cohort; L MoE layers; D devices.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ...runtime.migrating.predictor import Predictor
from ...solvers import netmoe
from ...solvers.arrays import Floats, Ints
from ...solvers.luffy import Attention, Law, deal, first_homes
from ...solvers.placement import Placement
from ...solvers.rehoming import rehome
from .cohort import Cohort
from .traffic import SampleCounts


@dataclass(slots=True)
class Totals:
    """Sums over all re-homings, one per step and layer: objectives by name, their bound, and seconds."""

    name: str = "link_cost"
    value: float = 0.0
    bound: float = 0.0
    bound_kind: str | None = None
    backend: str = "moeplan"
    layers: int = 0
    wall_s: float = 0.0

    def add(self, rehomed: netmoe.Rehomed) -> None:
        """Add the re-homing of a step after a layer."""
        for outcome in rehomed.dealt:
            self.name, self.backend = outcome.objective.name, outcome.backend
            self.value += outcome.objective.value
        for outcome in (*rehomed.dealt, *([rehomed.whole] if rehomed.whole else [])):
            self.bound += outcome.bound or 0.0
            self.bound_kind = outcome.bound_kind or self.bound_kind
            self.wall_s += outcome.wall_s
        self.layers += 1


@dataclass(frozen=True, slots=True, eq=False)
class Homes:
    """Devices of a cohort's samples when each layer begins and after the last, int64 `[L+1, I]`."""

    device: Ints
    totals: Totals = field(default_factory=Totals)


# The homes that a rule gives a cohort's samples under a placement; those of an incomplete last step stay.
HomeRule = Callable[[SampleCounts, Placement, Cohort], Homes]


def stay(counts: SampleCounts, placement: Placement, cohort: Cohort) -> Homes:
    """Homes of samples that stay where they start."""
    assert cohort.home is not None
    return Homes(np.tile(cohort.home, (placement.num_layers + 1, 1)))


@dataclass(frozen=True, slots=True)
class Dealing:
    """Samples are dealt before the first layer, as a data loader does, and stay.

    The largest comes first, each to the device with the least. A step's devices take the same number of samples each,
    rounded up.
    """

    law: Law | None = None  #: What counts is the attention of a sample; None: its tokens

    def __call__(self, counts: SampleCounts, placement: Placement, cohort: Cohort) -> Homes:
        """Homes as `HomeRule` says."""
        assert cohort.home is not None
        device_I, size = cohort.home.copy(), placement.num_devices
        weight_I: Ints | Floats = cohort.unit_tokens
        if self.law is not None:
            weight_I = Attention(self.law, cohort.unit_tokens, counts.index.contexts[cohort.unit_ids]).cost
        for at in cohort.steps():
            device_I[at] = deal(weight_I[at], np.full(size, -(-len(at) // size)))
        return Homes(np.tile(device_I, (placement.num_layers + 1, 1)))


@dataclass(frozen=True, slots=True, eq=False)
class Rehoming:
    """Every layer's combine delivers samples to new homes (`solvers.rehoming.rehome`).

    Notes
    -----
    The samples of a step are in the runtime's order, by the device that they start on, which decides between homes that
    are equally good. A step's devices take the same number of samples each, rounded up, unless a law lets them differ.
    Where samples are dealt in rounds, their length is that of this layer: the pairs they have in it. The bound is for
    the whole step then, too.
    """

    method: str  #: Of NetMoE, or with a law of LUFFY
    predictor: Predictor | None = None  #: What says the next layer's copies; None: only this layer's routing decides
    oracle: bool = False  #: Whether the next layer's real copies are known
    bounded: Cohort | None = None  #: The cohort whose totals are bounded, too
    law: Law | None = None  #: Of attention, for methods that count it

    def __call__(self, counts: SampleCounts, placement: Placement, cohort: Cohort) -> Homes:
        """Homes as `HomeRule` says."""
        assert cohort.home is not None
        traffic, totals = counts.under(placement), Totals()
        num_layers = placement.num_layers
        device_LI = np.tile(cohort.home, (num_layers + 1, 1))
        for at, layer in itertools.product(cohort.steps_by_home(), range(num_layers)):
            place, following, attention = cohort.unit_ids[at], None, None
            if self.law is not None:
                tokens_I, contexts_I = counts.index.unit_tokens[place], counts.index.contexts[place]
                attention = Attention(self.law, tokens_I, contexts_I, follows=layer + 1 < num_layers)
            if attention is not None and layer == 0:
                device_LI[0, at] = first_homes(self.method, attention, cohort.home[at], placement.num_devices)
            if self.oracle:
                following = traffic.following(layer, place)
            elif self.predictor is not None and counts.experts is not None:
                following = self.predictor.copies(layer, counts.experts[place, layer])
            rehomed = rehome(
                self.method,
                traffic.copies[place, layer],
                traffic.pairs[place, layer].sum(axis=1),
                counts.cluster,
                attention=attention,
                next_copies=following,
                copy_bytes=counts.trace.meta.model.copy_bytes,
                bounded=cohort is self.bounded,
            )
            device_LI[layer + 1 :, at] = rehomed.device_of_sample
            totals.add(rehomed)
        return Homes(device_LI, totals)
