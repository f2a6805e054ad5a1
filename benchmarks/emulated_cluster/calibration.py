"""The profile of an emulated cluster, taken before anything else runs on it, with all ranks at work.

Exchanges are measured alone, for steps in which each waits for the last, and as chunks of layers whose experts take no
time, for those that overlap: with what it takes a rank to pack, start and unpack each of them. The former are uneven,
as routing is. Gathers are a kind of their own: blocks pass from node to node, then on inside each.

Legend: D devices, N nodes, G devices per node.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from moeplan.profilers.cluster import Cluster
from moeplan.profilers.exchanged import Exchange
from moeplan.profilers.fits.fit import Fit, Prediction
from moeplan.profilers.fits.fitting import fit_arrays
from moeplan.profilers.fits.laws import AlphaBeta
from moeplan.profilers.routed import partial_sums
from moeplan.runtime.engine.chunks import Chunks
from moeplan.runtime.engine.gather import Gather
from moeplan.runtime.engine.layer import ParallelExperts
from moeplan.runtime.engine.layer_placement import LayerPlacement
from moeplan.solvers import contiguous

from .model import Waiter, WaitingExperts
from .timing import Call, interleaved

NODE_BYTES = (
    2_000,
    20_000,
    70_000,
    150_000,
    300_000,
    600_000,
    1_200_000,
    3_200_000,
    8_000_000,
)  # through the busiest node
SHAPE = 8.0  # of the gamma distribution that uneven bytes follow: a coefficient of variation of 0.35
LOCAL_BYTES = (2_000, 200_000, 800_000)  # that leave a rank for the others of its node
CHUNK_BYTES = (20_000, 60_000, 180_000, 550_000, 1_600_000)  # that leave a node in a chunk
DEGREES = (1, 2, 4, 8, 16)  # chunks of a layer, as long as they are no more than the largest in all
GATHER_BYTES = (5_000, 40_000, 150_000, 500_000, 1_500_000, 4_000_000)  # N - 1 times those of a node
WAITS_S = (1e-3, 4e-3, 15e-3, 60e-3)
ROWS, WIDTH = 32, 1024  # that experts are called with
ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Profile:
    """What exchanges and experts take.

    Parameters
    ----------
    call_s
        Seconds of an exchange of counts, one for every rank.
    inter, intra
        An exchange by the bytes that leave the busiest node, and by those that leave a rank for its own node.
    chunk
        A chunk of a layer by the bytes that leave a node.
    gather
        An all-gather by N - 1 times the bytes of the fullest node.
    wait
        A call of experts by the seconds that it shall take.
    """

    call_s: float
    inter: Fit
    intra: Fit
    chunk: Fit
    gather: Fit
    wait: AlphaBeta

    def inter_s(self, n: np.ndarray) -> Prediction:
        """Seconds of exchanges in which these bytes leave the busiest node."""
        return self.inter.predict({"bytes": n}, n)

    def intra_s(self, n: np.ndarray) -> Prediction:
        """Seconds of exchanges in which these bytes leave a rank for its own node."""
        return self.intra.predict({"bytes": n}, n)

    def gather_s(self, n: float) -> float:
        """Seconds of an all-gather by N - 1 times the bytes of the fullest node."""
        sizes = np.array([n])
        return float(self.gather.predict({"bytes": sizes}, sizes).seconds[0])

    def chunk_s(self, n: np.ndarray) -> np.ndarray:
        """Seconds of chunks of which these bytes leave a node."""
        return self.chunk.predict({"bytes": n}, n).seconds


def calibrate(cluster: Cluster, rank: int) -> Profile:
    """The profile of the cluster that this rank is of; all ranks call it together, and get the same."""
    group, size = cluster.devices_per_node, cluster.num_devices
    together_D = (np.arange(size) // group == rank // group) & (np.arange(size) != rank)
    uneven = {n: uneven_bytes(cluster, n, seed) for seed, n in enumerate(NODE_BYTES)}
    inter = {n: _exchange(bytes_DD[rank], bytes_DD[:, rank]) for n, bytes_DD in uneven.items()}
    intra = {n: _even(together_D * (n // max(group - 1, 1))) for n in LOCAL_BYTES}
    layers = [(r, n) for n in CHUNK_BYTES for r in DEGREES if r * n <= CHUNK_BYTES[-1]]
    gathers = {n: _gather(n // max(size - group, 1), cluster) for n in GATHER_BYTES}
    counts = torch.zeros(2, size, dtype=torch.int64)
    call_s = float(_medians([lambda: dist.all_to_all_single(*counts)])[0])
    layers_s = _medians([_layer(cluster, r, n) for r, n in layers])
    return Profile(
        call_s,
        _fitted(list(inter), _medians(list(inter.values()))),
        _fitted(list(intra), _medians(list(intra.values()))),
        _fitted([n for _, n in layers], (layers_s - call_s) / [2 * r for r, _ in layers]),
        _fitted(list(gathers), _medians(list(gathers.values()))),
        AlphaBeta.of(np.array(WAITS_S), _medians([_experts(seconds) for seconds in WAITS_S])),
    )


def uneven_bytes(cluster: Cluster, node_bytes: int, seed: int) -> np.ndarray:
    """Bytes from each rank to each of other nodes, `[D, D]`, drawn so that the busiest node sends or receives so many.

    Exchanges of routed tokens are uneven; even ones saturate every port at once, and take longer.
    """
    group, size = cluster.devices_per_node, cluster.num_devices
    node_D = np.arange(size) // group
    weight_DD = np.random.default_rng(seed).gamma(SHAPE, size=(size, size)) * (node_D[:, None] != node_D)
    between_NN = weight_DD.reshape(-1, group, cluster.num_nodes, group).sum(axis=(1, 3))
    busiest = max(between_NN.sum(axis=0).max(), between_NN.sum(axis=1).max())
    return np.asarray(np.rint(weight_DD * (node_bytes / busiest if busiest else 0.0)).astype(np.int64))


def _even(bytes_D: np.ndarray) -> Call:
    """An all-to-all in which a rank receives from each rank what it sends to it."""
    return _exchange(bytes_D, bytes_D)


def _exchange(sent_D: np.ndarray, received_D: np.ndarray) -> Call:
    """An all-to-all of so many bytes to and from each rank."""
    there, back = sent_D.tolist(), received_D.tolist()
    sent, arrived = (torch.zeros(sum(splits), dtype=torch.uint8) for splits in (there, back))
    return lambda: Exchange.start(arrived, sent, back, there).wait()


def _gather(block_bytes: int, cluster: Cluster) -> Call:
    rows, ones = torch.zeros(1, block_bytes, dtype=torch.uint8), [1] * cluster.num_devices
    return lambda: Gather.start(ones, None, rows, devices_per_node=cluster.devices_per_node).wait()


def _layer(cluster: Cluster, degree: int, node_bytes: int) -> Call:
    """A layer in so many chunks, of which so much leaves every node, with experts that take no time."""
    size, tokens = cluster.num_devices, degree * ROWS
    apart = ROWS * cluster.devices_per_node * (size - cluster.devices_per_node) // size
    placement = contiguous.solve(1, size, cluster).placement
    chunks = Chunks.of([1 / degree] * degree, [1.0])
    experts = WaitingExperts(1, Waiter(), 0.0, 0.0)
    here = LayerPlacement.of(placement, 0, devices_per_node=cluster.devices_per_node, group=None)
    layer = ParallelExperts(experts, here, None, chunks=chunks)
    x, ids = torch.zeros(tokens, node_bytes // (4 * max(apart, 1))), (torch.arange(tokens) % size)[:, None]
    weights = torch.ones(tokens, 1)
    return torch.inference_mode()(lambda: layer(x, ids, weights))


def _experts(seconds: float) -> Call:
    """Experts of one device as the runtime calls them."""
    rows, experts = torch.zeros(ROWS, WIDTH), WaitingExperts(1, Waiter(), seconds, 0.0)
    slots, weights = torch.zeros(ROWS, 1, dtype=torch.int64), torch.ones(ROWS, 1)
    return lambda: partial_sums(experts, rows, slots, weights)


def _fitted(sizes: Sequence[int], seconds: np.ndarray) -> Fit:
    works = np.array(sizes)
    fit = fit_arrays({"bytes": works}, works.astype(float), seconds)
    assert fit is not None
    return fit


def _medians(calls: Sequence[Call]) -> np.ndarray:
    found = interleaved({str(at): call for at, call in enumerate(calls)}, ROUNDS)
    return np.array([seconds.median for seconds in found.values()])
