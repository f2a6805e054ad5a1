"""What `moeplan solve` was asked for, validated before anything is read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import UsageError
from ..profilers.cluster import Cluster
from ..runtime.plan import DispatchModel

__all__ = ["Request"]

Method = Literal["sweeps", "ilp"]
Backend = Literal["ortools", "pulp"]
Phase = Literal["prefill", "decode", "train"]

MAX_DEVICES = 4096
SAMPLES_PER_DEVICE = 4  # the default step: 4 samples a device


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The inputs and options of one solve.

    Parameters
    ----------
    cluster
        Where the plan is for; at least 2 devices.
    dispatch_model
        None: the strategy's own.
    method, backend
        How exflow solves: "sweeps", or "ilp" by OR-tools or PuLP.
    slots, redundant
        Slots a device, or slots beyond one an expert in all; neither: one slot an expert, rounded up.
    phases
        Only tokens of these phases count; empty: all.
    fit_fraction
        The share of samples to fit on.
    samples_per_step
        Samples of a derived step; None: 4 a device.
    """

    strategy: str
    trace: str
    cluster: Cluster
    profile: Path | None = None
    dispatch_model: DispatchModel | None = None
    method: Method = "sweeps"
    backend: Backend = "ortools"
    slots: int | None = None
    redundant: int = 0
    phases: tuple[Phase, ...] = ()
    fit_fraction: float = 0.5
    samples_per_step: int | None = None
    time_limit_s: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.cluster.num_devices > MAX_DEVICES:
            raise UsageError(f"{self.cluster.num_devices:,} devices; plans are made for at most {MAX_DEVICES:,}")
        if self.cluster.num_devices < 2:
            raise UsageError("one device: there is nothing to place; say where the plan is for with --cluster NxG")
        if not 0 < self.fit_fraction <= 1:
            raise UsageError(f"--fit-fraction {self.fit_fraction}; expected above 0 and at most 1")
        if self.samples_per_step is not None and not 1 <= self.samples_per_step < 2**31:
            raise UsageError(f"--samples-per-step {self.samples_per_step}; expected at least 1 and below 2^31")
        if not 0 < self.time_limit_s < 1e7:
            raise UsageError(f"--time-limit {self.time_limit_s}; expected seconds above 0")
        if self.slots is not None and self.redundant:
            raise UsageError("--slots and --redundant both say how many slots there are; give one of them")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed {self.seed}; expected at least 0 and below 2^63")
        if self.method != "sweeps" and self.strategy != "exflow":
            raise UsageError(f"--method {self.method} with --strategy {self.strategy}; only exflow has it")
        if self.backend != "ortools" and self.method != "ilp":
            raise UsageError(f"--backend {self.backend} without --method ilp; it solves the ilp only")
        if self.redundant < 0:
            raise UsageError(f"--redundant {self.redundant}; expected at least 0")

    @property
    def step_samples(self) -> int:
        """Samples of a derived step."""
        return self.samples_per_step or SAMPLES_PER_DEVICE * self.cluster.num_devices
