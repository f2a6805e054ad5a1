"""Table III: what a placement keeps on data that it was not profiled on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from ...routing import GPT_OSS, Routing, embedded, gpt_oss, gpt_oss_records
from ...study import Row, Settings, Study
from .kept import Kept, in_order, nodes_of, placed, seeds_of

Array = np.ndarray
AFFINITY = "affinity, of that on the profiled data"
NUM_DEVICES = 8
TABLE_III = {"Pile": (1.0, 1.0), "C4": (0.998, 0.997), "Dolma": (0.998, 0.989), "Yelp": (1.005, 1.003)}  # GPU, node
KINDS: dict[str, Callable[[dict[str, Any]], bool]] = {  # what is profiled; all else is tested
    "MMLU to GPQA": lambda record: record["dataset"].startswith("mmlu"),
    "GPQA to MMLU": lambda record: record["dataset"].startswith("gpqa"),
    "plain to looping text": lambda record: not record["has_repetition"],
}


@dataclass(frozen=True, slots=True)
class Shift:
    """Routing, and which of its tokens `[T]` are of the data that is profiled."""

    name: str
    read: Callable[[], tuple[Routing, Array]]
    seeds: int


@dataclass(frozen=True, slots=True)
class Shifted:
    """What one placement keeps of the profiled data's unseen samples, and of other data."""

    same: Kept
    other: Kept

    @property
    def device(self) -> float:
        """What stays on the GPU of other data, over the same of the profiled."""
        return self.other.device / self.same.device

    @property
    def node(self) -> float:
        """As `device`, on the node."""
        return self.other.node / self.same.node


def shifted(routing: Routing, profiled: Array, seed: int) -> Shifted:
    """Placed, nodes first, by the profiled data of half of the samples; judged by that of the other and by the rest."""
    half = routing.half(seed)
    placement = placed(routing.transitions(profiled & half), nodes_of(NUM_DEVICES))
    same, other = (routing.transitions(kept) for kept in (profiled & ~half, ~profiled))
    return Shifted(Kept.of(same, placement), Kept.of(other, placement))


def _rows(instance: Shift) -> Iterator[Row]:
    routing, profiled = instance.read()
    other = routing.transitions(~profiled)
    found = [shifted(routing, profiled, seed) for seed in range(instance.seeds)]
    more = {
        "in node": fmean(one.node for one in found),
        "least of seeds": min(one.device for one in found),
        "most of seeds": max(one.device for one in found),
        "stays, %": fmean(one.other.device for one in found),
        "in order, %": Kept.of(other, in_order(other, NUM_DEVICES)).device,
    }
    yield Row(instance.name, "nodes first", quality=fmean(one.device for one in found), more=more)


def _stated(instance: dict[str, tuple[float, float]]) -> Iterator[Row]:
    for name, (device, node) in instance.items():
        yield Row(f"Pile to {name}", "paper", quality=device, more={"in node": node})


def _gpt_oss(settings: Settings) -> list[Shift]:
    def read(profiled: Callable[[dict[str, Any]], bool]) -> tuple[Routing, Array]:
        routing = gpt_oss(settings.data)
        return routing, np.array([profiled(record) for record in gpt_oss_records(settings.data, routing)])

    return [Shift(name, partial(read, profiled), seeds_of(settings)) for name, profiled in KINDS.items()]


def _embedded(settings: Settings) -> list[Shift]:
    def read() -> tuple[Routing, Array]:
        routing = embedded()
        return routing, routing.sample < np.median(routing.sample)

    return [Shift("first to second half", read, seeds_of(settings))]


STUDIES = (
    Study(
        title="Table III: the paper",
        quality=AFFINITY,
        note="How much of what stays on the profiled data stays on other data, as the paper states. "
        "GPT 350M MoE-32, profiled on the Pile; on how many GPUs is not stated. Synthetic tokens are of no data"
        " set, hence none stand beside.",
        instances=lambda _: [TABLE_III],
        rows=_stated,
    ),
    Study(
        title="Table III: gpt-oss-20b",
        quality=AFFINITY,
        note="How much of what stays on the profiled data stays on other data, on gpt-oss-20b. "
        "What stays on the GPU (in node: on the node) of other data, over the same of the profiled data's samples"
        " that were not fitted; 2 nodes of 4 GPUs, nodes first, first choices. Means of 3 halves of the samples. 443"
        " samples are of MMLU, 29 of GPQA; other data sets, and training data, are not at hand.",
        needs=GPT_OSS,
        instances=_gpt_oss,
        rows=_rows,
    ),
    Study(
        title="Table III: the embedded model",
        quality=AFFINITY,
        note="How much of what stays on the profiled data stays on other data, on the embedded model. "
        "Profiled on the first half of its text, tested on the second: other topics of one documentation.",
        instances=_embedded,
        rows=_rows,
    ),
)
