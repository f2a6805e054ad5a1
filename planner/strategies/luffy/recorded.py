"""Rows that condensing saves on a recorded trace with its hidden states; the error is not known there.

Legend: T tokens; L MoE layers; K experts per token.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....errors import UsageError
from ....profilers.cluster import Cluster
from ....runtime.engine.clusters import compared, grouped
from ....solvers.arrays import Ints
from ....solvers.ports import port_copies, remote_visits
from ....traces.embeddings import KEYS, Embeddings
from ....traces.reader import Trace
from ...evaluate.choosers import choosers
from ...evaluate.journey import Journey
from ...evaluate.scene import Scene
from ...evaluate.tally import Tally
from .folding import Counted, Rows, Seats, Way, as_int64


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """The tokens of one part of a trace in complete steps, with their hidden states."""

    embeddings: Embeddings
    places: Ints  #: Of each token among all hidden states
    ids: Tensor  #: int64 `[T, L, K]`
    weights: Tensor  #: float32 `[T, L, K]`
    seats: Seats
    unit: Ints  #: Of each token, by its place in the part

    def count(self, way: Way) -> Counted:
        """The rows of a way."""
        counted = Counted()
        for layer, (rows, stands_n) in enumerate(self._folded(way)):
            counted.add(layer, rows.counted(stands_n))
        return counted

    def condensed(self, way: Way, exact: Tally, cluster: Cluster) -> Tally:
        """The tally of a way, from that of every row travelling for itself: fewer copies, fewer pairs on devices.

        `folded` is what each device does for it in the layers in which rows stand for others.
        """
        assert exact.ports is not None
        dispatch, loads = np.zeros_like(exact.ports.dispatch), np.zeros_like(exact.loads)
        folded = np.zeros((2, *exact.loads.shape), np.int64)
        for layer, (rows, stands_n) in enumerate(self._folded(way)):
            kept_n = (stands_n == torch.arange(len(stands_n))).numpy()
            row_n, place_n = rows.copies.row[kept_n], rows.copies.place[kept_n]
            step_n, home_n = (of_T[row_n].numpy() for of_T in (self.seats.step, self.seats.home))
            device_n1 = (place_n % cluster.num_devices).int().numpy()[:, None]
            dispatch[:, layer] = port_copies(
                remote_visits(device_n1, home_n), device_n1, home_n, step_n, num_steps=len(loads), cluster=cluster
            )
            asked_n = (rows.copies.beside[kept_n] >= 0).sum(1).numpy()
            np.add.at(loads[:, layer], (step_n, device_n1[:, 0]), asked_n)
            if way.condenses(layer):
                self._add_work(rows, folded[:, :, layer])
        ports = replace(exact.ports, dispatch=dispatch, combine=None)
        return replace(exact, loads=loads, ports=ports, folded=folded)

    def _add_work(self, rows: Rows, folded_2BD: Ints) -> None:
        """Count the copies of each step and device, and the pairs of them that are compared."""
        order_n, size_g = grouped(rows.copies, rows.remote_n)
        first_g = order_n[size_g.cumsum(0) - size_g]
        for counts_BD, row, number in (
            (folded_2BD[0], rows.copies.row, 1),
            (folded_2BD[1], rows.copies.row[first_g], compared(size_g.numpy())),
        ):
            np.add.at(counts_BD, (self.seats.step[row].numpy(), self.seats.home[row].numpy()), number)

    def _folded(self, way: Way) -> Iterator[tuple[Rows, Tensor]]:
        """The rows of each layer, and the row that stands for each, int64 `[n]`."""
        for layer in range(self.ids.shape[1]):
            x_TM = torch.from_numpy(self.embeddings.layer(layer, self.places)).float()
            rows, weight_TK = way.rows(layer, self.ids[:, layer], self.weights[:, layer], self.seats)
            yield rows, way.stands(layer, rows, x_TM, weight_TK)


def recorded(scene: Scene, journey: Journey, embeddings: Embeddings) -> list[Recorded]:
    """The parts of a scene; UsageError where gate weights were not recorded."""
    trace, parts = scene.source, list[Recorded]()
    assert isinstance(trace, Trace)
    if not trace.has_weights:
        raise UsageError(f"{trace.path}: no gate weights, which weigh rows; record with --weights --embeddings all")
    shape = scene.cluster.num_devices, scene.cluster.devices_per_node
    for cohort, ((choose, _),) in zip(scene.cohorts, choosers(scene, [journey]), strict=True):
        columns = defaultdict[str, list[Any]](list)
        for batch, unit_T in scene.index.batches(trace, scene.phases or None, weights=True):
            assert batch.weights is not None
            at = cohort.locate(batch, unit_T)
            ids_TLK, kept_T = batch.ids[at.rows], at.step >= 0
            device = [choose(layer, ids_TLK[:, layer], at.home, at) for layer in range(ids_TLK.shape[1])]
            of_all = {name: column[at.rows] for name in KEYS if (column := getattr(batch, name)) is not None}
            of_all |= {"ids": ids_TLK, "weights": batch.weights[at.rows], "device": np.stack(device, axis=1)}
            of_all |= {"unit": at.unit, "home": at.home, "at": np.append(cohort.step_of_row, -1)[at.step]}
            for name, column in of_all.items():
                columns[name].append(column[kept_T])
        whole = {name: np.concatenate(of) for name, of in columns.items()}
        seats = Seats(as_int64(whole["home"]), as_int64(whole["at"]), shape, _looked_up(as_int64(whole["device"])))
        weights = torch.from_numpy(whole["weights"].astype(np.float32))
        parts.append(
            Recorded(embeddings, embeddings.places(whole), as_int64(whole["ids"]), weights, seats, whole["unit"])
        )
    return parts


def _looked_up(device_TLK: Tensor) -> Any:
    return lambda layer, _: device_TLK[:, layer]
