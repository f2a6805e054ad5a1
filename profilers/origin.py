"""An origin: where a part of a profile comes from, the environment it was measured in and how quiet that was."""

import datetime
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import InputError
from .measurement import Measurement, relative_width
from .topology import Topology

GridName = Literal["quick", "default", "full"]
WIDE = 0.20  # relative width of a median's interval
MOST_WIDE = 0.20  # share of sizes
MOST_DRIFT = 2.0  # of the reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine and software of rank 0; None where there is no such part."""

    device: str  #: The device's name; on CPU the processor's
    backend: str
    torch: str
    #: driver, nccl: versions of the GPU driver and of NCCL
    driver: str | None
    nccl: str | None
    cpu: str
    #: cpus, threads: processors this process may run on, and threads of a rank
    cpus: int
    threads: int
    num_ranks: int
    num_hosts: int
    python: str
    system: str

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if not "".join(text for text in astuple(self) if isinstance(text, str)).isprintable():
            raise InputError("environment with text that does not print; expected names and versions")

    @classmethod
    def of(cls, device: str, hosts: Sequence[str]) -> Self:
        """The environment of the rank that asks, which computes on "cpu" or "cuda:i", in a world on these hosts."""
        import torch

        cuda = device != "cpu"
        cpu = _first(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo")) or platform.processor() or platform.machine()
        return cls(
            device=torch.cuda.get_device_name(torch.device(device)) if cuda else cpu,
            backend="nccl" if cuda else "gloo",
            torch=torch.__version__,
            driver=_first(r"Kernel Module\D*([\d.]+)", Path("/proc/driver/nvidia/version")) if cuda else None,
            nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else None,  # type: ignore[no-untyped-call]
            cpu=cpu,
            cpus=len(os.sched_getaffinity(0)),
            threads=torch.get_num_threads(),
            num_ranks=len(hosts),
            num_hosts=len(set(hosts)),
            python=platform.python_version(),
            system=f"{platform.system()} {platform.release()}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Noise of the machine during a run."""

    #: sizes, wide: sizes measured, and those whose median has a 95 % interval wider than 20 % of it
    sizes: int
    wide: int
    #: Seconds of a small matrix product of fixed size, the best of three on the slowest rank, before each size
    reference_s: tuple[float, ...] = ()

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        if not (0 <= self.wide <= self.sizes and all(second > 0 for second in self.reference_s)):
            raise InputError(f"noise of {self.wide} wide sizes of {self.sizes}; expected at most all, and seconds > 0")

    @classmethod
    def of(cls, measurements: Iterable[Measurement], reference_s: Iterable[float]) -> Self:
        """The noise of these measurements."""
        widths = [relative_width(one.samples_s) for one in measurements]
        return cls(sizes=len(widths), wide=sum(width > WIDE for width in widths), reference_s=tuple(reference_s))

    @property
    def drift(self) -> float:
        """The reference's 90th percentile over its 10th; 1 where it took the same time throughout."""
        if not self.reference_s:
            return 1.0
        low, high = np.percentile(self.reference_s, (10, 90)).tolist()
        return float(high / low)

    @property
    def noisy(self) -> bool:
        """Check whether more than a fifth of the sizes are wide, or the reference drifted by more than 2."""
        return self.wide > MOST_WIDE * self.sizes or self.drift > MOST_DRIFT

    def __str__(self) -> str:
        verdict = "this machine is NOISY" if self.noisy else "quiet enough"
        share = math.ceil(100 * self.wide / max(1, self.sizes))
        return (
            f"{verdict}: {self.wide} of {self.sizes} medians ({share} %) are uncertain by 20 % or more;"
            f" a fixed reference varied {self.drift:.2f} times (10th to 90th percentile)"
        )


class Origin(BaseModel):
    """Origin of a part of a profile, and its date."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: "measured" on this hardware, "described" in words, or read from published "tables"
    kind: Literal["measured", "described", "tables"]
    created_at: datetime.datetime
    environment: Environment | None = None  #: Of what was measured; None otherwise
    #: quick, full: whether a short grid was measured, in a short time, or the whole grid without a limit
    quick: bool = False
    full: bool = False
    left_out: Annotated[int, Field(ge=0)] = 0  #: Sizes of the grid that this time did not allow
    missing: Mapping[str, Annotated[int, Field(ge=1)]] = {}  #: Key of a series to how many of these are its sizes
    #: topology, noise: which ranks share a node, and how quiet the machine was; None where nothing was measured
    topology: Topology | None = None
    noise: Noise | None = None
    #: A description's text, the tables' system and versions, or the merged profile's path; informational
    name: str | None = None

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if (self.kind == "measured") != (self.environment is not None):
            raise InputError(
                f"origin {self.kind!r} with {'an' if self.environment else 'no'} environment; expected one of what was"
                " measured, none of what was described or read"
            )
        if self.kind != "measured" and (self.topology or self.noise or self.quick or self.full):
            raise InputError(f"origin {self.kind!r} with a topology or noise; expected them of what was measured only")
        if self.quick and self.full:
            raise InputError("an origin that is quick and full; expected one of them")
        if not "".join((self.name or "", *self.missing)).isprintable():
            raise InputError("an origin whose name does not print; expected a description, a system or a path")
        return self

    @property
    def grid(self) -> GridName:
        """The name of the grid that was measured."""
        return "quick" if self.quick else "full" if self.full else "default"


def now() -> datetime.datetime:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)


def _first(pattern: str, path: Path) -> str | None:
    """The first match of a pattern in a file of the system."""
    try:
        match = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match[1].strip() if match else None
