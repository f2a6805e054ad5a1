"""Small values for tests: models, trace metadata, and profiles whose seconds follow a line."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from moeplan.profilers.cases import CASES
from moeplan.profilers.cases.case import Case
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.fits.fitting import fit_series
from moeplan.profilers.measurement import Measurement
from moeplan.profilers.origin import Environment, Origin, now
from moeplan.profilers.profile import Profile
from moeplan.profilers.series import LinkKind, Series
from moeplan.runtime.condensed_rows import CondensedRows
from moeplan.traces.model import ModelSpec
from moeplan.traces.schema import TraceMeta

__all__ = ["environment", "known", "measured_profile", "meta_of", "model", "series"]

T = TypeVar("T")
MEASURED: Mapping[str, Case] = {**CASES, CondensedRows.name: CondensedRows()}  # by `moeplan profile`


def known(value: T | None) -> T:
    """A value that must be there."""
    assert value is not None
    return value


def model(layers: int = 3, experts: int = 8, top_k: int = 2, **known: Any) -> ModelSpec:
    """A model of so many layers, all of them with experts."""
    facts: dict[str, Any] = {"name": "small", "layer_ids": tuple(range(layers)), **known}
    return ModelSpec(num_experts=experts, top_k=top_k, **facts)


def meta_of(spec: ModelSpec, **known: Any) -> TraceMeta:
    """The metadata of a trace of tokens of a model."""
    facts: dict[str, Any] = {"form": "tokens", "recorder": "test", **known}
    return TraceMeta(model=spec, **facts)


def environment(**known: Any) -> Environment:
    """Where a profile was measured."""
    facts: dict[str, Any] = {"num_ranks": 2, "num_hosts": 1, "device": "x", "backend": "gloo", "cpu": "x", **known}
    versions: dict[str, Any] = {"torch": "2", "driver": None, "nccl": None, "python": "3.11", "system": "Linux"}
    return Environment(cpus=2, threads=1, **versions, **facts)


def series(
    case: str,
    ranks: int = 1,
    link: LinkKind | None = None,
    *,
    dtype: str = "uint8",
    sizes: Iterable[Mapping[str, int]] | None = None,
    a_s: float = 1e-5,
    b_s: float = 1e-9,
    noise: Callable[[], float] = lambda: 1.0,
) -> Series:
    """Measurements of a case that take `a_s + b_s * work` seconds each, but for noise, and their fit."""
    sizes = [{"bytes": ranks * 10**power} for power in (3, 4, 5, 6)] if sizes is None else [*map(dict, sizes)]
    if case == "point_to_point":
        sizes = [{**size, "first": 0, "second": 1} for size in sizes]
    measured = MEASURED[case]
    works = ((size, measured.work(size, ranks)) for size in sizes)
    taken = tuple(Measurement.of(size, work, [(a_s + b_s * work) * noise()] * 6) for size, work in works)
    known: dict[str, Any] = {"unit": measured.unit, "fit": fit_series(measured, ranks, taken)}
    return Series(case=case, dtype=dtype, ranks=ranks, link=link, measurements=taken, **known)


def measured_profile(
    cluster: Cluster, *measured: Series, device: str = "GPU", complete: bool = True, **known: Any
) -> Profile:
    """A profile that was measured on a cluster."""
    hardware = environment(device=device, num_ranks=cluster.num_devices, num_hosts=cluster.num_nodes)
    origin = Origin(kind="measured", created_at=now(), environment=hardware, **known)
    return Profile.of(origin, cluster, measured, complete=complete)
