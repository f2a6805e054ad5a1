"""Curves of exchanges: seconds by the bytes of the busiest port, from what was measured of round trips, or from links.

Legend: N nodes; P ranks of a collective.
"""

import numpy as np

from ...errors import InputError
from ...profilers.cases.routed_exchange import busiest_node
from ...profilers.cluster import Cluster
from ...profilers.fits.fit import Prediction
from ...profilers.predictor import predicted
from ...profilers.series import Series
from ...solvers.arrays import Floats
from ...solvers.ports import LinkClass
from ...solvers.seconds import Curve, Curve2

COUNT_BYTES = 8  # of an int64


def half_trip(series: Series, places: int, shared_by: float, moves: int = 0) -> Curve2:
    """Half of a dispatch and a combine whose busiest rank sends as much, and keeps as large a part k of all it handles.

    Of the P - 1 other ranks P - P / N are on other nodes: so much of a port's bytes crosses between nodes. Where f
    devices of a node share its link, what was measured counts by the larger of a port's part 1 / f, and the mean part
    of a device of the busiest node (`Sharing.busiest`).

    Notes
    -----
    With s bytes sent, h handled and k = 1 - s / h limited to the parts measured, an exchange is timed that sends s:

        t = t(s / (1 - k), k)                                                                                   (1)

    Below the least part measured, that of even copies, it copies more than there is. Above the largest one, K, it
    copies less, and is flagged as extrapolated: there t is the line through the times of h with the least and the
    largest part, taken on to 1 - s / h, but no less than (1) and no more than t(h, K), which sends too much.
    """
    assert series.fit is not None
    if "kept" not in series.fit.axes:
        raise InputError(
            f"the profile's {series.key} does not tell how much ranks keep, as earlier versions measured it;"
            " measure again: moeplan profile"
        )
    share = (series.ranks - 1) / (series.ranks - series.ranks / places)
    if shared_by > 1:
        share = 1 / max(1 / (shared_by * share), busiest_node(series.ranks, places))
    least, largest = series.fit.measured["kept"]

    def trip(handled: Floats, kept: Floats | float) -> Prediction:
        return predicted(series, {"bytes": np.maximum(handled, 1.0), "moves": float(moves), "kept": kept})

    def curve(port: Floats, most: Floats) -> Prediction:
        """Seconds of one way of the exchange, by bytes of the busiest port and the most that a rank handles."""
        sent, handled = port * share, np.maximum(port * share + most - port, 1.0)
        kept = 100 * (1 - sent / handled)
        within = np.clip(kept, least, largest)
        beyond = np.maximum(kept - largest, 0) / max(largest - least, 1)
        sends = trip(sent / (1 - within / 100), within)
        if not beyond.any():
            return Prediction(sends.seconds / 2, sends.low / 2, sends.high / 2, sends.extrapolated)
        fewer, more = trip(handled, least), trip(handled, largest)

        def half(floor: Floats, start: Floats, end: Floats) -> Floats:
            return np.where(beyond > 0, np.clip(end + beyond * (end - start), floor, end), floor) / 2

        return Prediction(
            half(sends.seconds, fewer.seconds, more.seconds),
            half(sends.low, fewer.low, more.low),
            half(sends.high, fewer.high, more.high),
            sends.extrapolated | (np.rint(kept) > largest),  # parts were measured in whole percents
        )

    return curve


def agreement_seconds(even: Series | None) -> tuple[float, float]:
    """Seconds in which ranks exchange their counts: of copies, and where tokens move on also of sums.

    By the even all-to-all of as many bytes: one int64 to each of P ranks, and 2 P to each.
    """
    if even is None:
        return 0.0, 0.0
    of_copies, of_sums = predicted(even, {"bytes": COUNT_BYTES * np.array([even.ranks, 2 * even.ranks**2])}).seconds
    return float(of_copies), float(of_copies + of_sums)


def by_port(curve: Curve) -> Curve2:
    """A curve over bytes through a port, whatever devices send themselves."""
    return lambda port, _most: curve(port)


def of_buffers(series: Series, places: int) -> Curve:
    """Over bytes through a port, by the even exchange whose buffer sends as much: bytes = port x P / (P - 1).

    Between nodes, (N - 1) / N of a buffer crosses, hence N for P; in whole blocks, of at least one byte.
    """

    def curve(port: Floats) -> Prediction:
        blocks = np.ceil(np.maximum(port, 1.0) * places / (places - 1) / series.ranks)
        return predicted(series, {"bytes": blocks * series.ranks})

    return curve


def of_link(cluster: Cluster, kind: LinkClass) -> Curve:
    """A link's latency and seconds a byte."""
    link = cluster.links[kind]

    def curve(port: Floats) -> Prediction:
        seconds = link.latency_s + link.s_per_byte * port
        return Prediction(seconds, seconds, seconds, np.zeros(port.shape, dtype=bool))

    return curve
