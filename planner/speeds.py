"""Speeds: the curves by which a model's parts are timed on a cluster, and where each comes from.

Legend: N nodes; G devices a node; P ranks of a collective.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..profilers.cluster import Cluster
from ..profilers.fits.prediction import Prediction
from ..profilers.predictor import predict
from ..profilers.profile import Profile
from ..profilers.series import Series
from ..solvers.ports import LinkClass, link_classes
from ..solvers.seconds import Curve, Curve2
from ..traces.model import ModelSpec

__all__ = ["DTYPES", "Speeds"]

DTYPES = {1: ("fp8", "fp8_block", "uint8", "int8"), 2: ("bf16", "fp16"), 4: ("fp32",)}  # of so many bytes, best first
Numbers = NDArray[np.float64]


@dataclass(slots=True)
class Speeds:
    """What a profile and a cluster's links say of a model's parts; None where they say nothing.

    Parameters
    ----------
    exchange, gather
        Of an all-to-all and an all-gather over bytes through the busiest port, one curve a link class.
    experts
        Over token-expert pairs and experts of a device.
    attention
        Over (batch, length).
    sources, missing
        Where each curve is from; why a part has none.
    """

    exchange: list[Curve] | None = None
    gather: list[Curve] | None = None
    experts: Curve2 | None = None
    attention: Curve2 | None = None
    sources: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, profile: Profile | None, cluster: Cluster, model: ModelSpec, *, samples: bool) -> "Speeds | None":
        """The speeds of a model; None without a profile and without links.

        Parameters
        ----------
        samples
            Whether the trace has samples: contexts for attention.

        Notes
        -----
        A collective's curve is the profile's series over as many ranks as it has here (G inside a node, all between
        nodes), in a dtype as wide as the model's where there is one, else the link's alpha-beta, which has no error
        of its own. Experts and attention: that dtype, else another one, said; experts looped, as the runtime computes
        them, where that was measured, else grouped.
        """
        if profile is None and not cluster.links:
            return None
        speeds = cls()
        speeds.exchange = speeds._collective("all_to_all", "dispatch", profile, cluster, model)
        speeds.gather = speeds._collective("all_gather", "kv", profile, cluster, model)
        speeds._find_experts(profile, model)
        speeds._find_attention(profile, model, samples=samples)
        return speeds

    def _collective(
        self, case: str, part: str, profile: Profile | None, cluster: Cluster, model: ModelSpec
    ) -> list[Curve] | None:
        """Curves of a collective over bytes through the busiest port, one a link class."""
        size = model.attention.kv_size if part == "kv" else model.hidden_size
        if not (size and model.dtype_bytes):
            self.missing[part] = f"the model's {'kv_size' if part == 'kv' else 'hidden_size'} or dtype is not known"
            return None
        curves = []
        for link in link_classes(cluster):
            ranks = cluster.devices_per_node if link == "intra" else cluster.num_devices
            places = cluster.devices_per_node if link == "intra" else cluster.num_nodes
            series = _series(profile, case, model, ranks=ranks, link=link)
            if profile is not None and series is not None:
                self.sources[f"{part} {link}"] = series.key
                curves.append(_even_exchange(profile, series, places))
            elif link in cluster.links:
                self.sources[f"{part} {link}"] = f"link {link}"
                curves.append(_link(cluster, link))
            else:
                self.missing[part] = f"no {case} of {ranks} ranks and no {link} link; give --link {link}=GBps:us"
                return None
        return curves

    def _find_experts(self, profile: Profile | None, model: ModelSpec) -> None:
        series = _series(profile, "expert_ffn", model)
        unknown = [name for name in ("hidden_size", "ffn_size") if getattr(model, name) is None]
        if unknown:
            self.missing["experts"] = f"the model's {' and '.join(unknown)} is not in the trace"
        elif profile is None or series is None:
            self.missing["experts"] = "the profile has no expert_ffn"
        else:
            self.sources["experts"] = series.key
            assert series.fit is not None
            least = series.fit.measured.get("grouped", (0, 0))[0]
            sizes = {"hidden": model.hidden_size, "ffn": model.ffn_size, "grouped": least}
            self.experts = _of_two(profile, series, ("tokens", "experts"), sizes)

    def _find_attention(self, profile: Profile | None, model: ModelSpec, *, samples: bool) -> None:
        series = _series(profile, "attention", model)
        if not samples:
            self.missing["attention"] = "the trace has no samples, hence no contexts"
        elif model.hidden_size is None:
            self.missing["attention"] = "the model's hidden_size is not in the trace"
        elif profile is None or series is None:
            self.missing["attention"] = "the profile has no attention"
        else:
            self.sources["attention"] = series.key
            self.attention = _of_two(profile, series, ("batch", "length"), {"hidden": model.hidden_size})


def _series(
    profile: Profile | None, case: str, model: ModelSpec, *, ranks: int = 1, link: LinkClass | None = None
) -> Series | None:
    """The fitted series of a case, in the dtype that suits the model best."""
    wanted = DTYPES.get(model.dtype_bytes or 0, ())
    found = [
        series
        for series in ({} if profile is None else profile.series).values()
        if (series.case, series.ranks, series.link) == (case, ranks, link) and series.fit is not None
    ]
    order = {dtype: place for place, dtype in enumerate(wanted)}
    return min(found, key=lambda series: (order.get(series.dtype, len(order)), series.key), default=None)


def _even_exchange(profile: Profile, series: Series, places: int) -> Curve:
    """Over bytes through a port, by the even exchange whose buffer sends as much: bytes = port x P / (P - 1).

    Between nodes, (N - 1) / N of a buffer crosses, hence N for P; in whole blocks, of at least one byte.
    """

    def curve(port: Numbers) -> Prediction:
        blocks = np.ceil(np.maximum(port, 1.0) * places / (places - 1) / series.ranks)
        return _predict(profile, series, {"bytes": blocks * series.ranks})

    return curve


def _link(cluster: Cluster, kind: LinkClass) -> Curve:
    """A link's latency and seconds a byte."""
    link = cluster.links[kind]

    def curve(port: Numbers) -> Prediction:
        seconds = link.latency_s + link.s_per_byte * port
        return Prediction(seconds, seconds, seconds, np.zeros(port.shape, dtype=bool))

    return curve


def _of_two(profile: Profile, series: Series, names: tuple[str, str], sizes: dict[str, int | None]) -> Curve2:
    def curve(first: Numbers, second: Numbers) -> Prediction:
        fixed = {name: np.full(first.shape, float(value or 0)) for name, value in sizes.items()}
        return _predict(profile, series, {names[0]: first, names[1]: second} | fixed)

    return curve


def _predict(profile: Profile, series: Series, size: dict[str, Numbers]) -> Prediction:
    return predict(profile, series.case, size, dtype=series.dtype, ranks=series.ranks, link=series.link)
