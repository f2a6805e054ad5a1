"""What `moeplan solve` was asked for, validated before anything is read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import UsageError
from ..profilers.cluster import Cluster
from ..runtime.decisions import MAX_CAPACITY_FACTOR, DispatchModel

__all__ = ["Groups", "Objective", "Request"]

Method = Literal[
    "annealing",
    "sweeps",
    "ilp",
    "exact",
    "paper",
    "robust",
    "unequal",
    "sum",
    "even",
    "bottleneck",
    "refined",
    "published",
]
Backend = Literal["ortools", "pulp"]
Bound = Literal["simple", "thorough"]
Objective = Literal["hops", "copies"]
Groups = Literal["split", "whole"]
Phase = Literal["prefill", "decode", "train"]

MAX_DEVICES = 4096
MAX_DEGREE = 1024
TIME_LIMIT_S = 30.0
SAMPLES_PER_DEVICE = 4  # the default step: 4 samples a device


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The inputs and options of one solve.

    Parameters
    ----------
    cluster
        Where the plan is for; at least 2 devices.
    mixture
        Of eplb: traces with their weights, `trace` the first of them; empty: that trace alone.
    on
        The plan whose decisions this one's is added to.
    previous, horizon_tokens
        The plan in force that this one replaces, and the tokens that it will serve: moving an expert must pay for
        itself within them. None: moves are not weighed.
    dispatch_model
        None: the strategy's own.
    time_limit_s
        Of exflow's search; the others end by themselves.
    method, backend
        How the strategy solves, None: its own way; what solves exflow's "ilp" and "paper".
    objective, bound, max_load
        Of exflow: what it keeps together (None: hops, copies under standard dispatch), how it is bounded, and the most
        load of a device in a layer, over the mean (None: no cap, but of copies under standard dispatch).
    slots, redundant
        Slots a device, or slots beyond one an expert in all, "auto" as few as serve; neither: one slot an expert,
        rounded up.
    groups
        Whether expert groups may be split between devices (exflow, eplb).
    dead, pins, quantile
        Of eplb: ranks that hold no expert; pairs (expert, device) that go together in every layer; the quantile of the
        steps' balance that is minimised (None: their mean), where steps are recorded.
    phases
        Only tokens of these phases count; empty: all.
    fit_fraction
        The share of samples to fit on.
    samples_per_step
        Samples of a derived step; None: 4 a device.
    max_degree, joint, full_duplex, capacity_factor
        What pipemoe may choose: degrees up to this one (None: 32, the most Tutel takes), one degree for both passes;
        whether dispatch and combine do not share a channel; and every expert's buffer over its mean rows, padded to a
        multiple of both degrees (None: no fixed capacity, what is routed is sent).
    """

    strategy: str
    trace: str
    cluster: Cluster
    mixture: tuple[tuple[str, float], ...] = ()
    profile: Path | None = None
    on: Path | None = None
    previous: Path | None = None
    dispatch_model: DispatchModel | None = None
    method: Method | None = None
    backend: Backend = "ortools"
    objective: Objective | None = None
    bound: Bound = "simple"
    max_load: float | None = None
    slots: int | None = None
    redundant: int | Literal["auto"] = 0
    groups: Groups = "split"
    dead: tuple[int, ...] = ()
    pins: tuple[tuple[int, int], ...] = ()
    quantile: float | None = None
    phases: tuple[Phase, ...] = ()
    fit_fraction: float = 0.5
    samples_per_step: int | None = None
    time_limit_s: float = TIME_LIMIT_S
    seed: int = 0
    max_degree: int | None = None
    joint: bool = False
    full_duplex: bool = False
    horizon_tokens: float | None = None
    capacity_factor: float | None = None

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
        if self.time_limit_s != TIME_LIMIT_S and self.strategy != "exflow":
            raise UsageError(f"--time-limit with --strategy {self.strategy}; only exflow searches until its limit")
        if self.slots is not None and self.redundant:
            raise UsageError("--slots and --redundant both say how many slots there are; give one of them")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed {self.seed}; expected at least 0 and below 2^63")
        if self.backend != "ortools" and (self.strategy, self.method) not in (("exflow", "ilp"), ("exflow", "paper")):
            raise UsageError(f"--backend {self.backend} without exflow's --method ilp or paper, all that it solves")
        if self.redundant != "auto" and self.redundant < 0:
            raise UsageError(f"--redundant {self.redundant}; expected at least 0")
        self._check_balance()
        self._check_search()
        self._check_pipeline()
        self._check_replan()

    def _check_balance(self) -> None:
        """What only eplb is asked for."""
        flags = {
            "several --trace, or --trace FILE:WEIGHT": bool(self.mixture),
            "--redundant auto": self.redundant == "auto",
            "--dead": bool(self.dead),
            "--pin": bool(self.pins),
            "--quantile": self.quantile is not None,
        }
        if self.strategy != "eplb" and any(flags.values()):
            given = " and ".join(name for name, is_given in flags.items() if is_given)
            raise UsageError(f"{given} with --strategy {self.strategy}; only eplb has such flags")
        if self.groups == "whole" and self.strategy not in ("exflow", "eplb"):
            raise UsageError(f"--groups whole with --strategy {self.strategy}; only exflow and eplb keep groups whole")
        if self.method == "published" and self.quantile is not None:
            raise UsageError("--quantile with --method published, which goes by all loads together; leave one out")
        if self.mixture and self.quantile is not None:
            raise UsageError("--quantile with several --trace, which are balanced together; leave it out")
        if wild := [weight for _, weight in self.mixture if not 1e-9 <= weight <= 1e9]:
            raise UsageError(f"--trace of weight {wild[0]}; expected weights above 0, 1e-9 to 1e9")
        if self.groups == "whole" and (self.redundant or self.dead):
            raise UsageError(
                "--groups whole with --redundant or --dead; whole groups take one slot an expert, equally many a device"
            )
        if self.quantile is not None and not 0 < self.quantile <= 1:
            raise UsageError(f"--quantile {self.quantile}; expected above 0 and at most 1 (the worst step)")
        size = self.cluster.num_devices
        if wrong := [rank for rank in (*self.dead, *(device for _, device in self.pins)) if not 0 <= rank < size]:
            raise UsageError(f"--dead or --pin of device {wrong[0]}; expected 0 to {size - 1} on {self.cluster}")
        if len(set(self.dead)) > size - 1:
            raise UsageError(f"--dead {size} times; expected a device that is alive")
        if lost := [pin for pin in self.pins if pin[1] in self.dead]:
            raise UsageError(f"--pin {lost[0][0]}@{lost[0][1]}; device {lost[0][1]} is --dead: pin it elsewhere")

    def _check_search(self) -> None:
        """What only exflow is asked for."""
        if self.strategy != "exflow" and (self.objective or self.bound != "simple" or self.max_load is not None):
            raise UsageError(
                f"--objective, --bound or --max-load with --strategy {self.strategy}; only exflow has them"
            )
        if self.objective == "copies" and self.method not in (None, "annealing"):
            raise UsageError(f"--objective copies with --method {self.method}; only annealing knows of it")
        if self.max_load is not None and not 1 <= self.max_load <= MAX_DEVICES:
            raise UsageError(f"--max-load {self.max_load}; expected 1 (all devices alike) or more, of the mean")

    def _check_pipeline(self) -> None:
        """What only pipemoe is asked for."""
        flags = {
            "--max-degree": self.max_degree is not None,
            "--joint": self.joint,
            "--full-duplex": self.full_duplex,
            "--capacity-factor": self.capacity_factor is not None,
        }
        if self.strategy != "pipemoe" and any(flags.values()):
            given = " and ".join(name for name, is_given in flags.items() if is_given)
            raise UsageError(f"{given} with --strategy {self.strategy}; only pipemoe has such flags")
        if self.max_degree is not None and not 1 <= self.max_degree <= MAX_DEGREE:
            raise UsageError(f"--max-degree {self.max_degree}; expected 1 to {MAX_DEGREE:,}")
        if self.capacity_factor is not None and not 0 < self.capacity_factor <= MAX_CAPACITY_FACTOR:
            raise UsageError(
                f"--capacity-factor {self.capacity_factor}; expected above 0 and at most {MAX_CAPACITY_FACTOR:,}"
            )
        if self.joint and self.method == "unequal":
            raise UsageError("--joint with --method unequal; one degree for both passes is for equal chunks")

    def _check_replan(self) -> None:
        """What stands in the way of replacing a plan in force."""
        if self.previous is not None and (self.strategy != "exflow" or self.on is not None):
            raise UsageError("--from with --on, or with another strategy than exflow; only exflow re-plans, by itself")
        if self.previous is not None and self.groups == "whole":
            raise UsageError("--from with --groups whole; moves of single experts split groups: leave one of them out")
        if self.horizon_tokens is not None and not (self.previous is not None and 1 <= self.horizon_tokens < 1e18):
            raise UsageError(f"--horizon {self.horizon_tokens}; expected 1 token or more, below 1e18, beside --from")

    @property
    def alive(self) -> list[int]:
        """The ranks that may hold experts."""
        return [rank for rank in range(self.cluster.num_devices) if rank not in self.dead]

    @property
    def step_samples(self) -> int:
        """Samples of a derived step."""
        return self.samples_per_step or SAMPLES_PER_DEVICE * self.cluster.num_devices
