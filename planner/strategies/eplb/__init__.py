"""EPLB placements: the strategy, mixtures of traces, replicas that pay, phases exchanged, the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from ....errors import UsageError
from ....profilers.cluster import Cluster
from ...params import HOW, QUANTILE, WHOLE, PlacementParams, flag, short_number

DEAD = "A rank without experts; may repeat."
PIN = "Keep an expert on a device in all layers; may repeat."


def _pins(texts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Experts and devices of `EXPERT@DEVICE` each."""
    pins = set()
    for text in texts:
        expert, _, device = text.partition("@")
        if None in [short_number(one) if one.isdecimal() else None for one in (expert, device)]:
            raise UsageError(f"--pin {text:.40}; expected EXPERT@DEVICE, e.g. 12@3")
        pins.add((int(expert), int(device)))
    return tuple(sorted(pins))


def _ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(ranks)))


@dataclass(frozen=True, kw_only=True)
class EplbParams(PlacementParams):
    """Parameters of eplb: how loads are made even."""

    mixes: ClassVar[bool] = True
    weighs: ClassVar[bool] = True
    methods: ClassVar[Mapping[str, str]] = {
        "auto": "Published or refined, by a trial",
        "refined": "Published, then swaps off the busiest device",
        "published": "DeepSeek's EPLB",
    }

    method: Literal["auto", "refined", "published"] = flag("auto", HOW)
    groups: Literal["split", "whole"] = flag("split", WHOLE)
    dead: tuple[int, ...] = flag((), DEAD, metavar="RANK", parse=_ranks, repeats=True, kind=int)
    pins: tuple[tuple[int, int], ...] = flag((), PIN, name="pin", metavar="EXPERT@DEVICE", parse=_pins, repeats=True)
    replica_rule: Literal["even", "nearest", "quota", "lp"] = flag(
        "even",
        "How tokens choose replicas; nearest: on their node, which then holds all experts; lp (SGLang), quota: split"
        " exactly.",
    )
    quantile: float | None = flag(None, **QUANTILE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method == "published" and self.quantile is not None:
            raise UsageError("--quantile with --method published, which goes by all loads together; leave one out")
        if self.quantile is not None and self.replica_rule in ("quota", "lp"):
            raise UsageError(
                f"--quantile with --replica-rule {self.replica_rule}, which lowers the mean; leave one out"
            )
        if self.groups == "whole" and (self.redundant or self.dead):
            raise UsageError(
                "--groups whole with --redundant or --dead; groups take one slot per expert, equally many per device"
            )

        if self.replica_rule == "nearest" and (self.dead or self.pins or self.groups == "whole"):
            raise UsageError(
                "--replica-rule nearest with --dead, --pin or --groups whole; every node holds the same experts: leave"
                " one out"
            )

    def check(self, cluster: Cluster) -> None:
        """Refuse devices that the cluster does not have, none alive, and a single node to be nearest to."""
        size = cluster.num_devices
        if self.replica_rule == "nearest" and cluster.num_nodes == 1:
            raise UsageError(f"--replica-rule nearest on {cluster}, a single node; expected several, or leave it out")
        if wrong := [rank for rank in (*self.dead, *(device for _, device in self.pins)) if not 0 <= rank < size]:
            raise UsageError(f"--dead or --pin of device {wrong[0]}; expected 0 to {size - 1} on {cluster}")
        if len(self.dead) > size - 1:
            raise UsageError(f"--dead {size} times; expected a device that is alive")
        if lost := [pin for pin in self.pins if pin[1] in self.dead]:
            raise UsageError(f"--pin {lost[0][0]}@{lost[0][1]}; device {lost[0][1]} is --dead: pin it elsewhere")
