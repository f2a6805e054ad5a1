"""The cost model: the curves by which a model's parts are timed on a cluster, and where each comes from.

Legend: N nodes; G devices per node; P ranks of a collective.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...profilers.cluster import Cluster
from ...profilers.fits.fit import Prediction
from ...profilers.fits.laws import AttentionLaw
from ...profilers.fits.roofline import Roofline
from ...profilers.predictor import predicted
from ...profilers.profile import Profile
from ...profilers.series import ELEMENT_BYTES, Series
from ...runtime.decisions import DispatchModel
from ...solvers.arrays import Floats
from ...solvers.ports import ALONE, LinkClass, Sharing, link_classes
from ...solvers.seconds import Curve, Curve2, Curve3
from ...traces.model import ModelSpec
from .trips import agreement_seconds, by_port, half_trip, of_buffers, of_link

HIDDEN = {"hidden": "hidden_size"}  # axes of a series, and the sizes of a model that they are
FFN = HIDDEN | {"ffn": "ffn_size"}
WHOLE_SAMPLES = 2.0**30  # tokens of a sample in a step, more than any has
ENCODING = "encoding"  # of fp8 rows, decoding included: a part of dispatch and combine where a contender has a wire
FOLDING = "folding"  # of rows that stand for others, finding them included: only where a contender has some
EXPERT_CASES = ("routed_block", "expert_ffn")  # what the runtime computes, where that was measured
MOVED = "attention (moved samples)"
FUSED = "(fused)"  # measured, but not as the runtime attends to samples that move
NO_PROFILE = "no profile"
COUNTS_ALONE = "counts do not say where tokens are"
JOIN = "join it with one that has, by moeplan profile --merge"
SAY = "say it at moeplan trace import"


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost curves of a model's parts, from a profile and a cluster's links. None: no curve is known."""

    #: exchange, gather: of an all-to-all and an all-gather over bytes through the busiest port, one curve a link class;
    #: an exchange also over the bytes of the busiest device with those it sends itself, and how even it is
    #: (`exchange_seconds`)
    exchange: Sequence[Curve3] | None = None
    onward: Sequence[Curve3] | None = None  #: Of exchanges after which tokens live elsewhere; None: as `exchange`
    #: Seconds of agreeing on counts in a round trip, of `exchange` and of `onward` in each link class, once a layer,
    #: whatever its chunks. 0 where round trips have none, or no all-to-all was measured; None: 0 in every class
    agreements: Sequence[tuple[float, float]] | None = None
    shared: Sharing = ALONE  #: How the ports of devices make up the bytes of an exchange between nodes
    #: Of encoding and decoding the rows of a wire, over their number; None: it takes no time
    encoding: Curve | None = None
    #: Of finding rows that stand for others and folding them, as `folding_seconds` has it; None: it takes no time
    folding: Curve3 | None = None
    gather: Sequence[Curve] | None = None
    experts: Curve2 | None = None  #: Over token-expert pairs and experts of a device
    attention: Curve3 | None = None  #: Over (batch, length, calls)
    moved: Curve3 | None = None  #: Of attention of samples that move; None: as `attention`
    #: sources, missing: where each curve is from; why a part has none
    sources: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    #: other_dtype, noisy: parts timed in a dtype of another width than the model's, or on a machine that was noisy
    other_dtype: tuple[str, ...] = ()
    noisy: tuple[str, ...] = ()

    def exchanges(self, dispatch_model: DispatchModel) -> Sequence[Curve3] | None:
        """The curves of a dispatch model's exchanges."""
        return (None if dispatch_model == "standard" else self.onward) or self.exchange

    def attention_of(self, dispatch_model: DispatchModel) -> Curve3 | None:
        """The curve of a dispatch model's attention."""
        return (self.moved if dispatch_model == "migrating" else None) or self.attention

    def agreements_of(self, dispatch_model: DispatchModel) -> Sequence[float]:
        """Seconds of agreeing on counts in a round trip of a dispatch model, one a link class."""
        if self.agreements is None:
            return [0.0] * len(self.exchange or ())
        return [returning if dispatch_model == "standard" else moving for returning, moving in self.agreements]

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
        moving: bool = False,
    ) -> "CostModel | None":
        """The costs of a model; None without a profile and without links.

        Only `samples` give contexts for attention, of which `queries` tokens each are in a step on average (a roofline
        asks); `by_loads`, of loads of experts alone, nothing but experts is timed. `moving`: samples may move.

        Notes
        -----
        A collective's curve is the profile's series over as many ranks as it has here (G inside a node, all between
        nodes), in a dtype as wide as the model's where there is one, else the link's alpha-beta, which has no error
        of its own. A link of the cluster that is not the profile's was given, and stands in place of the series that
        crossed its kind. Where the profile has measured what `runtime` runs, that is taken: `routed_exchange` before
        `all_to_all`, `routed_block` before `expert_ffn`, of which looped experts come before grouped ones, and for
        samples that move `attended` before `attention`. Experts and attention: that dtype, else another one, said;
        attention as it was measured, multi-head with heads of 64, which a source says where the model has another size
        of K and V. A roofline knows the sizes of Q, K and V, and is called one; of latent attention (MLA) also the
        projections of low rank, and that steps of one token a sample attend in the latent space.
        """
        if profile is None and not cluster.links:
            return None
        parts = {
            "dispatch": _exchange(("routed_exchange", "all_to_all"), "dispatch", profile, cluster, model),
            "kv": _exchange(("all_gather",), "kv", profile, cluster, model),
            "experts": _curve_of_two("experts", EXPERT_CASES, ("tokens", "experts"), FFN, profile, model),
            "attention": _attention(profile, model, queries, moving=moving),
        }
        if not samples:
            parts["attention"] = _Part(missing="the trace has no samples, hence no contexts")
        if by_loads:
            parts |= dict.fromkeys(("dispatch", "kv", "attention"), _Part(missing=COUNTS_ALONE))
        if not parts["dispatch"].missing:
            parts[ENCODING] = _of_rows(ENCODING, "fp8_rows", ("rows",), profile, model)
            parts[FOLDING] = _of_rows(FOLDING, "condensed_rows", ("rows", "group", "backward"), profile, model)
        return cls(
            encoding=parts[ENCODING].curves if ENCODING in parts else None,
            folding=parts[FOLDING].curves if FOLDING in parts else None,
            exchange=parts["dispatch"].curves,
            onward=parts["dispatch"].onward,
            agreements=parts["dispatch"].agreements,
            shared=Sharing.of(cluster),
            gather=parts["kv"].curves,
            experts=parts["experts"].curves,
            attention=parts["attention"].curves,
            moved=parts["attention"].onward,
            sources={place: source for part in parts.values() for place, source in part.sources.items()},
            missing={name: part.missing for name, part in parts.items() if part.missing},
            other_dtype=tuple(name for name, part in parts.items() if part.other_dtype),
            noisy=tuple(name for name, part in parts.items() if part.noisy),
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """The curve or curves of a part of a step, with their sources by part and link class, or why it has none."""

    curves: Any = None
    onward: Any = None
    agreements: Sequence[tuple[float, float]] | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""
    other_dtype: bool = False
    noisy: bool = False


def _exchange(cases: Sequence[str], part: str, profile: Profile | None, cluster: Cluster, model: ModelSpec) -> _Part:
    """Curves of a collective, one a link class, of the first case that is there.

    Of the exchange ("dispatch") over the sizes of `exchange_seconds`, of the all-gather ("kv") over bytes through the
    busiest port alone. `onward` where exchanges after which tokens live elsewhere were measured.
    """
    size = model.attention.kv_size if part == "kv" else model.hidden_size
    if not (size and model.dtype_bytes):
        name = "kv_size" if part == "kv" else "hidden_size"
        return _Part(missing=f"the model's {name} or dtype is not known; {SAY}")
    curves, onward, sources, noisy = list[Curve | Curve3](), list[Curve | Curve3](), dict[str, str](), False
    moving, agreements = False, list[tuple[float, float]]()
    given = [] if profile is None else cluster.given_beside(profile.cluster)
    for link in link_classes(cluster):
        ranks = cluster.devices_per_node if link == "intra" else cluster.num_devices
        places = cluster.devices_per_node if link == "intra" else cluster.num_nodes
        series = None if link in given else _series(profile, cases, model, ranks=ranks, link=link)
        if profile is not None and link == "inter" and profile.cluster.devices_per_node != cluster.devices_per_node:
            series = None  # as many ranks on other nodes, of whose bytes another part crosses
        if series is None and link not in cluster.links:
            shape = f"{link}=GBps:us" + ", or inter=GBps:us:DEVICES where devices share it" * (link == "inter")
            return _Part(missing=f"no {cases[-1]} of {ranks} ranks and no {link} link; give --link {shape}")
        sources[f"{part} {link}"] = f"link {link}" if series is None else series.key
        if series is not None and series.case == "routed_exchange":
            shared = Sharing.of(cluster) if link == "inter" else ALONE
            curves.append(half_trip(series, places, shared.shared_by))
            onward.append(half_trip(series, places, shared.shared_by, moves=1))
            agreements.append(agreement_seconds(_series(profile, ("all_to_all",), model, ranks=ranks, link=link)))
            moving = True
        else:
            alone = of_link(cluster, link) if series is None else of_buffers(series, places)
            curves.append(alone if part == "kv" else by_port(alone))
            onward.append(curves[-1])
            agreements.append((0.0, 0.0))
        noisy |= _noisy(profile, series)
    return _Part(curves, onward if moving else None, agreements, sources, noisy=noisy)


def _of_rows(part: str, case: str, axes: Sequence[str], profile: Profile | None, model: ModelSpec) -> _Part:
    """Curve of a device's own work on rows, over their number and further axes."""
    series, hidden = _series(profile, (case,), model), model.hidden_size
    assert hidden is not None  # else no exchange is timed
    if series is None:
        why = f"the profile has no {case}; measure again: moeplan profile"
        return _Part(missing=NO_PROFILE if profile is None else why)

    def curve(rows: Floats, *others: Floats) -> Prediction:
        columns = zip(axes, (np.maximum(rows, 1.0), *others), strict=True)
        return predicted(series, {**dict(columns), "hidden": float(hidden)})

    return _Part(
        curve,
        sources={part: series.key},
        other_dtype=series.dtype not in _dtypes(model),
        noisy=_noisy(profile, series),
    )


def _attention(profile: Profile | None, model: ModelSpec, queries: float, *, moving: bool) -> _Part:
    """Curve of attention, and `onward` of that of samples that move, a source of which says where it is fused.

    What was not measured, but described or read from tables, is attention of all samples.
    """

    def of(*cases: str) -> _Part:
        return _curve_of_two("attention", cases, ("batch", "length"), HIDDEN, profile, model, queries=queries)

    fused, moved = of("attention"), of("attended", "attention")
    if not moving or fused.missing:
        return fused
    series = _series(profile, ("attended", "attention"), model)
    assert profile is not None
    assert series is not None
    is_fused = series.case == "attention"
    if is_fused and profile.origins[series.origin].kind != "measured":
        return fused
    source = moved.sources["attention"] + f" {FUSED}" * is_fused
    return replace(
        fused,
        onward=moved.curves,
        sources={**fused.sources, MOVED: source},
        other_dtype=fused.other_dtype or moved.other_dtype,
        noisy=fused.noisy or moved.noisy,
    )


def _curve_of_two(
    part: str,
    cases: Sequence[str],
    axes: tuple[str, str],
    fixed: Mapping[str, str],
    profile: Profile | None,
    model: ModelSpec,
    *,
    queries: float = WHOLE_SAMPLES,
) -> _Part:
    """Curve of the first of these cases that is there, over two sizes.

    Its other axes are `fixed` at sizes of the model, "grouped" at its least. Of attention: over calls, too.
    """
    series = _series(profile, cases, model)
    if unknown := [name for name in fixed.values() if getattr(model, name) is None]:
        return _Part(missing=f"the model's {' and '.join(unknown)} is not in the trace; {SAY}")
    if series is None or series.fit is None:
        return _Part(missing=NO_PROFILE if profile is None else f"the profile has no {cases[-1]}; {JOIN}")
    sizes, source = {axis: float(getattr(model, name)) for axis, name in fixed.items()}, series.key
    multi_head = 2.0 * (model.hidden_size or 0)
    more = {
        "queries": queries,
        "calls": 1.0,
        "q": model.attention.q_size or multi_head / 2,
        "kv": float(model.attention.kv_size or multi_head),
    }
    more |= {axis: float(least) for axis, (least, _) in series.fit.measured.items() if axis == "grouped"}
    heads, latent = model.attention.num_heads, model.attention.latent
    if isinstance(series.fit.model, Roofline):
        source += " (roofline, not measured)"
        if latent is not None and heads is not None:
            more["q"] = latent.q_size(heads, absorbed=queries <= 1)
            law = replace(series.fit.model, weights=float(latent.weights(heads, model.hidden_size or 0)))
            series = series.model_copy(update={"fit": replace(series.fit, model=law)})
    elif part == "attention" and model.attention.kv_size != multi_head:
        source += " (as MHA)"
    assert series.fit is not None
    sizes |= {axis: value for axis, value in more.items() if axis in series.fit.axes}

    def curve(first: Floats, second: Floats) -> Prediction:
        return predicted(series, {axes[0]: first, axes[1]: second, **sizes})

    return _Part(
        _in_calls(curve, series, sizes) if part == "attention" else curve,
        sources={part: source},
        other_dtype=series.dtype not in _dtypes(model),
        noisy=_noisy(profile, series),
    )


def _in_calls(curve: Curve2, series: Series, sizes: Mapping[str, float]) -> Curve3:
    """Attention over calls, too, of which each after the first takes the same time.

    Notes
    -----
    That time is the fitted law's. Of another fit it is what dividing the shortest sequences measured into as many calls
    as were measured adds for each; where no calls were told apart, all the time of a single token.
    """
    assert series.fit is not None
    fit, one = series.fit, np.ones(1)
    once, most = fit.measured.get("calls", (1, 1))
    if isinstance(fit.model, AttentionLaw):
        call_s = fit.model.another_s
    elif "calls" in fit.model.axes and most > once:
        size = {**sizes, "batch": float(fit.measured["batch"][1]), "length": float(fit.measured["length"][0])}
        divided_s, whole_s = (float(predicted(series, {**size, "calls": calls}).seconds) for calls in (most, once))
        call_s = max(divided_s - whole_s, 0.0) / (most - once)
    else:
        call_s = float(curve(one, one).seconds[0])

    def in_calls(batch: Floats, length: Floats, calls: Floats) -> Prediction:
        whole, more_s = curve(batch, length), call_s * (calls - 1)
        low, high = whole.low + more_s * fit.low_factor, whole.high + more_s * fit.high_factor
        return replace(whole, seconds=whole.seconds + more_s, low=low, high=high)

    return in_calls


def _noisy(profile: Profile | None, series: Series | None) -> bool:
    """Check whether a series was measured while its machine was noisy."""
    noise = None if profile is None or series is None else profile.origins[series.origin].noise
    return noise is not None and noise.noisy


def _dtypes(model: ModelSpec) -> list[str]:
    """Dtypes as wide as the model's, best first."""
    return [dtype for dtype, width in ELEMENT_BYTES.items() if width == model.dtype_bytes]


def _series(
    profile: Profile | None, cases: Sequence[str], model: ModelSpec, *, ranks: int = 1, link: LinkClass | None = None
) -> Series | None:
    """The fitted series of the first case that has one, in the dtype that suits the model best."""
    fitted = [
        series
        for series in ({} if profile is None else profile.series).values()
        if series.case in cases and (series.ranks, series.link) == (ranks, link) and series.fit is not None
    ]
    order = {dtype: place for place, dtype in enumerate(_dtypes(model))}
    return min(
        fitted,
        key=lambda series: (cases.index(series.case), order.get(series.dtype, len(order)), series.key),
        default=None,
    )
