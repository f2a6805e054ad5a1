"""The cost model: the curves by which a model's parts are timed on a cluster, and where each comes from.

Legend: N nodes; G devices a node; P ranks of a collective.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...profilers.cluster import Cluster
from ...profilers.fits.fit import Prediction
from ...profilers.predictor import predicted
from ...profilers.profile import Profile
from ...profilers.series import ELEMENT_BYTES, Series
from ...solvers.arrays import Floats
from ...solvers.ports import LinkClass, link_classes
from ...solvers.seconds import Curve, Curve2
from ...traces.model import ModelSpec

HIDDEN = {"hidden": "hidden_size"}  # axes of a series, and the sizes of a model that they are
FFN = HIDDEN | {"ffn": "ffn_size"}
WHOLE_SAMPLES = 2.0**30  # tokens of a sample in a step, more than any has
COUNTS_ALONE = "counts do not say where tokens are"


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost curves of a model's parts, from a profile and a cluster's links. None: no curve is known."""

    #: exchange, gather: of an all-to-all and an all-gather over bytes through the busiest port, one curve a link class
    exchange: Sequence[Curve] | None = None
    gather: Sequence[Curve] | None = None
    experts: Curve2 | None = None  #: Over token-expert pairs and experts of a device
    attention: Curve2 | None = None  #: Over (batch, length)
    #: sources, missing: where each curve is from; why a part has none
    sources: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    other_dtype: tuple[str, ...] = ()  #: Parts timed in a dtype of another width than the model's

    @classmethod
    def of(
        cls,
        profile: Profile | None,
        cluster: Cluster,
        model: ModelSpec,
        *,
        samples: bool,
        queries: float = WHOLE_SAMPLES,
        by_loads: bool = False,
    ) -> "CostModel | None":
        """The costs of a model; None without a profile and without links.

        Only `samples` give contexts for attention, of which `queries` tokens each are in a step on average (a roofline
        asks); `by_loads`, of loads of experts alone, nothing but experts is timed.

        Notes
        -----
        A collective's curve is the profile's series over as many ranks as it has here (G inside a node, all between
        nodes), in a dtype as wide as the model's where there is one, else the link's alpha-beta, which has no error
        of its own. Experts and attention: that dtype, else another one, said; experts looped, as the runtime computes
        them, where that was measured, else grouped; attention as it was measured, multi-head with heads of 64, which a
        source says where the model has another size of K and V. A roofline knows that size; its source says that it is
        one.
        """
        if profile is None and not cluster.links:
            return None
        parts = {
            "dispatch": _exchange("all_to_all", "dispatch", profile, cluster, model),
            "kv": _exchange("all_gather", "kv", profile, cluster, model),
            "experts": _curve_of_two("experts", "expert_ffn", ("tokens", "experts"), FFN, profile, model),
            "attention": _curve_of_two(
                "attention", "attention", ("batch", "length"), HIDDEN, profile, model, queries=queries
            ),
        }
        if not samples:
            parts["attention"] = _Part(missing="the trace has no samples, hence no contexts")
        if by_loads:
            parts |= dict.fromkeys(("dispatch", "kv", "attention"), _Part(missing=COUNTS_ALONE))
        return cls(
            exchange=parts["dispatch"].curves,
            gather=parts["kv"].curves,
            experts=parts["experts"].curves,
            attention=parts["attention"].curves,
            sources={place: source for part in parts.values() for place, source in part.sources.items()},
            missing={name: part.missing for name, part in parts.items() if part.missing},
            other_dtype=tuple(name for name, part in parts.items() if part.other_dtype),
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """The curve or curves of a part of a step, with their sources by part and link class, or why it has none."""

    curves: Any = None
    sources: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""
    other_dtype: bool = False


def _exchange(case: str, part: str, profile: Profile | None, cluster: Cluster, model: ModelSpec) -> _Part:
    """Curves of a collective over bytes through the busiest port, one a link class."""
    size = model.attention.kv_size if part == "kv" else model.hidden_size
    if not (size and model.dtype_bytes):
        return _Part(missing=f"the model's {'kv_size' if part == 'kv' else 'hidden_size'} or dtype is not known")
    curves, sources = [], {}
    for link in link_classes(cluster):
        ranks = cluster.devices_per_node if link == "intra" else cluster.num_devices
        places = cluster.devices_per_node if link == "intra" else cluster.num_nodes
        series = _series(profile, case, model, ranks=ranks, link=link)
        if series is None and link not in cluster.links:
            return _Part(missing=f"no {case} of {ranks} ranks and no {link} link; give --link {link}=GBps:us")
        curves.append(_link(cluster, link) if series is None else _even(series, places))
        sources[f"{part} {link}"] = f"link {link}" if series is None else series.key
    return _Part(curves, sources)


def _curve_of_two(
    part: str,
    case: str,
    axes: tuple[str, str],
    fixed: Mapping[str, str],
    profile: Profile | None,
    model: ModelSpec,
    *,
    queries: float = WHOLE_SAMPLES,
) -> _Part:
    """Curve of a case over two sizes; its other axes are `fixed` at sizes of the model, "grouped" at its least."""
    series = _series(profile, case, model)
    if unknown := [name for name in fixed.values() if getattr(model, name) is None]:
        return _Part(missing=f"the model's {' and '.join(unknown)} is not in the trace")
    if series is None or series.fit is None:
        return _Part(missing="no profile" if profile is None else f"the profile has no {case}")
    sizes = {axis: float(getattr(model, name)) for axis, name in fixed.items()}
    multi_head = 2.0 * (model.hidden_size or 0)
    more = {"queries": queries, "kv": float(model.attention.kv_size or multi_head)}
    more |= {axis: float(least) for axis, (least, _) in series.fit.measured.items() if axis == "grouped"}
    sizes |= {axis: value for axis, value in more.items() if axis in series.fit.axes}

    def curve(first: Floats, second: Floats) -> Prediction:
        return predicted(series, {axes[0]: first, axes[1]: second, **sizes})

    source = series.key
    if series.fit.model.kind == "roofline":
        source += " (roofline, not measured)"
    elif case == "attention" and model.attention.kv_size != multi_head:
        source += " (as MHA)"
    return _Part(curve, {part: source}, other_dtype=series.dtype not in _dtypes(model))


def _dtypes(model: ModelSpec) -> list[str]:
    """Dtypes as wide as the model's, best first."""
    return [dtype for dtype, width in ELEMENT_BYTES.items() if width == model.dtype_bytes]


def _series(
    profile: Profile | None, case: str, model: ModelSpec, *, ranks: int = 1, link: LinkClass | None = None
) -> Series | None:
    """The fitted series of a case, in the dtype that suits the model best."""
    fitted = [
        series
        for series in ({} if profile is None else profile.series).values()
        if (series.case, series.ranks, series.link) == (case, ranks, link) and series.fit is not None
    ]
    order = {dtype: place for place, dtype in enumerate(_dtypes(model))}
    return min(fitted, key=lambda series: (order.get(series.dtype, len(order)), series.key), default=None)


def _even(series: Series, places: int) -> Curve:
    """Over bytes through a port, by the even exchange whose buffer sends as much: bytes = port x P / (P - 1).

    Between nodes, (N - 1) / N of a buffer crosses, hence N for P; in whole blocks, of at least one byte.
    """

    def curve(port: Floats) -> Prediction:
        blocks = np.ceil(np.maximum(port, 1.0) * places / (places - 1) / series.ranks)
        return predicted(series, {"bytes": blocks * series.ranks})

    return curve


def _link(cluster: Cluster, kind: LinkClass) -> Curve:
    """A link's latency and seconds a byte."""
    link = cluster.links[kind]

    def curve(port: Floats) -> Prediction:
        seconds = link.latency_s + link.s_per_byte * port
        return Prediction(seconds, seconds, seconds, np.zeros(port.shape, dtype=bool))

    return curve
