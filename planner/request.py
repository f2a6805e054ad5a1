"""Request of `moeplan solve`, validated before any trace is read, and the usual profile and cluster."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_type_hints

from ..errors import InputError, UsageError
from ..files import sha256_file
from ..profilers.cluster import Cluster
from .evaluate.step_size import FIELDS, StepSize, size_of
from .params import Flag, Params, choices, flags_of, option_of
from .strategies.registry import STRATEGIES

Phase = Literal["prefill", "decode", "train"]
# As `runtime.decisions`, `runtime.wire` and `solvers.replicas` have them, which load numpy.
Dispatch = Literal["standard", "coherent", "migrating"]
Wire = Literal["fp8"]
ReplayRule = Literal["even", "nearest", "static", "round_robin", "quota", "lp"]

MAX_DEVICES = 4096
USUAL = "auto"  # the strategy where none is asked for
FIT_FRACTION = 0.5  # the default share of samples to fit on, where there are several


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The inputs and options of one solve."""

    strategy: str
    trace: str
    cluster: Cluster  #: Where the plan is for; at least 2 devices
    params: Params = field(default_factory=Params)  #: What the strategy alone is asked for
    #: Traces with their weights, `trace` the first of them; empty: that trace alone
    mixture: tuple[tuple[str, float], ...] = ()
    profile: Path | None = None
    on: Path | None = None  #: The plan whose decisions this one's is added to
    previous: Path | None = None  #: The plan in force that this one replaces
    dispatch_model: Dispatch | None = None  #: None: the strategy's own
    wire: Wire | None = None  #: The form in which hidden vectors travel; None: the base's
    engine_rule: ReplayRule | None = None  #: How an engine chooses among replicas; None: as a plan says
    waterfill: bool = False  #: Whether shared experts are load, which SGLang's waterfill puts where there is room
    phases: tuple[Phase, ...] = ()  #: Only tokens of these phases count; empty: all
    fit_fraction: float | None = None  #: The share of samples to fit on; None: half of them, or all of one alone
    purpose: Literal["serving", "training"] | None = None  #: What the plan is for; None: as the trace's phases say
    size: StepSize | None = None  #: Amount that runs at once where steps were not recorded; None: the usual one
    seed: int = 0

    @classmethod
    def of(cls, *, strategy: str, **settings: Any) -> Self:
        """A request by the names of its own fields, of `size_of`'s and of the strategy's parameters.

        UsageError for a flag of another strategy, or a value that a flag does not take.
        """
        if strategy not in STRATEGIES:
            raise UsageError(f"--strategy {strategy}; expected one of {', '.join(STRATEGIES)}")
        if sizes := {name: settings.pop(name) for name in FIELDS.values() if name in settings}:
            settings["size"] = size_of(**sizes)
        shared, kind = {one.name for one in dataclasses.fields(cls)}, STRATEGIES[strategy].params
        params = {name: value for name, value in settings.items() if name not in shared and value is not None}
        own, hints = dict(flags_of(kind)), get_type_hints(kind)
        for name, value in params.items():
            if name not in own:
                raise UsageError(_anothers(name, strategy))
            words = choices(hints[name])
            if words and isinstance(value, str) and value not in words:
                option = option_of(name, own[name])
                raise UsageError(f"{option} {value} with --strategy {strategy}; expected {' or '.join(words)}")
        mine = {name: settings[name] for name in settings.keys() & shared}
        return cls(strategy=strategy, params=kind(**params), **mine)

    def __post_init__(self) -> None:
        if self.cluster.num_devices > MAX_DEVICES:
            raise UsageError(f"{self.cluster.num_devices:,} devices; plans are made for at most {MAX_DEVICES:,}")
        if self.cluster.num_devices < 2:
            raise UsageError("one device: there is nothing to place; say where the plan is for with --cluster NxG")
        if self.fit_fraction is not None and not 0 < self.fit_fraction <= 1:
            raise UsageError(f"--fit-fraction {self.fit_fraction}; expected above 0 and at most 1")
        if self.size is not None and self.size.unit == "sequences" and self.purpose == "training":
            raise UsageError("--concurrency with --for training, which decodes nothing; leave one of them away")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed {self.seed!s:.30}; expected at least 0 and below 2^63")
        if self.mixture and not self.params.mixes:
            mixing = " and ".join(name for name, row in STRATEGIES.items() if row.params.mixes)
            raise UsageError(
                f"several --trace, or --trace FILE:WEIGHT, with --strategy {self.strategy}; it is a flag of {mixing}"
            )
        if self.previous is not None and not self.params.replans:
            planning = " and ".join(name for name, row in STRATEGIES.items() if row.params.replans)
            mend = f"only {planning} re-plans: give --strategy {planning}, or solve anew without it"
            raise UsageError(f"--from with --strategy {self.strategy}; {mend}")
        if self.previous is not None and self.on is not None:
            raise UsageError("--from with --on; leave one of them away")
        if wild := [weight for _, weight in self.mixture if not 1e-9 <= weight <= 1e9]:
            raise UsageError(f"--trace of weight {wild[0]}; expected weights above 0, 1e-9 to 1e9")
        self.params.check(self.cluster)


def _anothers(name: str, strategy: str) -> str:
    """Message that a flag belongs to other strategies."""
    owners = [owner for owner, row in STRATEGIES.items() if name in dict(flags_of(row.params))]
    known: Flag | None = next((dict(flags_of(STRATEGIES[owner].params))[name] for owner in owners), None)
    if known is None:
        raise TypeError(f"{name}: no field of a request, nor a parameter of a strategy")
    mend = "leave out --strategy" if USUAL in owners else f"give --strategy {' or '.join(owners)}"
    return f"{option_of(name, known)} with --strategy {strategy}; it is a flag of {' and '.join(owners)}: {mend}"


def profile_for(path: Path | None) -> Path | None:
    """The profile asked for, else profile.json where there is one."""
    if path is not None and not path.is_file():
        raise InputError(f"{path}: no such profile; write one with moeplan profile -o {path}")
    usual = Path("profile.json")
    return usual if path is None and usual.is_file() else path


def cluster_for(
    text: str | None, profile: Path | None, links: Iterable[str] = (), *, on: Path | None = None
) -> Cluster:
    """The cluster a plan is for: that of the base it is solved `on`, else `NxG`, else the profile's own.

    Its links are the base's, where that has any, else the profile's, as nodes of its size have them, some replaced by
    `KIND=GBps:us`. Links of a base that was made with another profile give way to this one's. A base's cluster may be
    said again, but no other.
    """
    from ..profilers import profile as profiles
    from ..runtime import plan as plans

    known = None if profile is None else profiles.load(profile).cluster
    asked, links = known if text is None else Cluster.parse(text), list(links)
    if on is not None:
        base = plans.load(on)
        based = base.cluster
        if text is not None and str(asked) != str(based):
            raise UsageError(f"--cluster {text} beside {on}, a plan for {based}; leave --cluster out")
        if links and based.links:
            raise UsageError(f"--link beside {on}, a plan for {based}, whose links are its own; leave it out")
        if based.links:
            if profile is None or base.inputs.profile is None or base.inputs.profile.sha256 == sha256_file(profile):
                return based
            return dataclasses.replace(based, links={**based.links, **profiles.load(profile).cluster.links_on(based)})
        asked = based
    if asked is None:
        raise UsageError("no cluster: there is no profile.json here; run moeplan profile, or give --cluster NxG")
    return dataclasses.replace(asked, links={} if known is None else known.links_on(asked)).linked(links)
