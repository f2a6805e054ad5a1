"""Traffic through each device's port: the copies that a dispatch or a combine sends and receives, by link class.

Legend: T tokens; I samples; K experts per token; B steps; D devices; C link classes, of samples both (`CLASSES`), of
tokens those that join devices (`link_classes`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..profilers.cluster import Cluster
from .arrays import Bools, Floats, Ints

LinkClass = Literal["intra", "inter"]
DispatchModel = Literal["standard", "coherent", "migrating"]  # how tokens travel between layers
CLASSES: tuple[LinkClass, LinkClass] = ("intra", "inter")


def link_classes(cluster: Cluster) -> tuple[LinkClass, ...]:
    """The link classes that join the devices of a cluster, "intra" before "inter"."""
    inside: tuple[LinkClass, ...] = ("intra",) if cluster.devices_per_node > 1 else ()
    return (*inside, "inter") if cluster.num_nodes > 1 else inside


def num_peers(link: LinkClass, num_devices: int, devices_per_node: int) -> int:
    """Number of devices that a device reaches over a link class."""
    return devices_per_node - 1 if link == "intra" else num_devices - devices_per_node


class Busiest(NamedTuple):
    """Sizes that decide the time of an exchange in each link class, `[..., C]`."""

    port: NDArray[Any]  #: Copies through the busiest port
    beside: NDArray[Any]  #: Copies that the busiest device sends itself, beyond `port`
    evenness: Floats  #: Copies of the mean port over those of the busiest one; 0 where nothing crosses


@dataclass(frozen=True, slots=True)
class Sharing:
    """Rule by which devices of a node share its link to other nodes."""

    devices_per_node: int = 1
    shared_by: float = 1.0  #: As `Link.shared_by`: how many times as fast a device is alone; 1: nothing is shared

    @classmethod
    def of(cls, cluster: Cluster) -> Self:
        """Sharing in a cluster of N nodes; where no link between them is known, every device has a port of its own."""
        link = cluster.links.get("inter") if cluster.num_nodes > 1 else None
        return cls(cluster.devices_per_node, 1.0 if link is None else link.shared_by)

    def busiest(self, copies: NDArray[np.number], kept: Ints | int = 0) -> Busiest:
        """Sizes that decide the time of an exchange in each link class.

        Parameters
        ----------
        copies
            Copies that leave (0) and reach (1) each device by link class, `[..., C, 2, D]`.
        kept
            Copies that each device sends itself, `[..., 1, 1, D]`. They count in the first class alone.

        Notes
        -----
        Of n copies of a device in a direction, max n. Between nodes, the last class of two, a device alone sends f
        times as fast as beside the G - 1 others of its node: the exchange takes as long as an even one of so many
        copies a device,

            max(max_d n_d / f, max_node sum_{d in node} n_d / G)                                                (1)

        which is max n for f = 1, and for f = G the mean of the busiest node's devices. Beside them stand, with k
        copies that a device keeps,

            max_d (n_d + k_d) - max_d n_d                                                                       (2)
        """
        port_C: NDArray[Any] = copies.max(axis=(-2, -1))
        own_C11 = np.arange(copies.shape[-3])[:, None, None] == 0
        beside_C: NDArray[Any] = (copies + kept * own_C11).max(axis=(-2, -1)) - port_C  # (2)
        if self.shared_by != 1:
            far_2NG = copies[..., -1, :, :].reshape(*copies.shape[:-3], copies.shape[-2], -1, self.devices_per_node)
            far = np.maximum(port_C[..., -1] / self.shared_by, far_2NG.mean(axis=-1).max(axis=(-2, -1)))  # (1)
            port_C = np.concatenate([port_C[..., :-1], far[..., None]], axis=-1)
        mean_C = copies.mean(axis=(-2, -1))
        return Busiest(port_C, beside_C, np.divide(mean_C, port_C, out=np.zeros_like(mean_C), where=port_C > 0))


ALONE = Sharing()


def remote_visits(devices: NDArray[np.integer], end: NDArray[np.integer]) -> Bools:
    """Mask of the choices that bring a token to a device that is neither its end nor one met before, `[K, T]`.

    Parameters
    ----------
    devices
        The device of each chosen expert `[T, K]`, -1 where not routed; node ids serve the same way.
    end
        The device (or node) each token is dispatched from, or combined at, `[T]`.
    """
    device_KT = np.ascontiguousarray(devices.T)
    new_KT = np.empty(device_KT.shape, dtype=bool)
    for k, device_T in enumerate(device_KT):
        new_KT[k] = (device_T >= 0) & (device_T != end)
        for earlier_T in device_KT[:k]:
            new_KT[k] &= device_T != earlier_T
    return new_KT


def combined_at(dispatch_model: DispatchModel, here: Ints, devices: NDArray[np.integer]) -> Ints:
    """The device at which each token's partial results meet, `[T]`: where it is before the next layer.

    Parameters
    ----------
    here
        The device it was dispatched from, `[T]`.
    devices
        Of its chosen experts `[T, K]`, largest gate weight first, -1 where not routed.

    Notes
    -----
    standard: `here`. coherent: the device of its first routed choice, `here` without one. migrating: the sample's next
    home, which no routing says, hence is not asked here.
    """
    assert dispatch_model != "migrating"
    if dispatch_model == "standard":
        return here
    first_T = np.argmax(devices >= 0, axis=1)
    device_T = devices[np.arange(len(devices)), first_T]
    return np.where(device_T >= 0, device_T, here).astype(np.int64)


def port_copies(
    visits: Bools, devices: NDArray[np.integer], end: Ints, step: Ints, *, num_steps: int, cluster: Cluster
) -> Ints:
    """The copies through every port, `[B, C, 2, D]`: those at the tokens' ends (0) and at their experts' devices (1).

    A dispatch sends (0) and receives (1); a combine sends (1) and receives (0).

    Parameters
    ----------
    visits
        Mask that `remote_visits` gives for these devices and ends, `[K, T]`.
    step
        The step of each token, `[T]`; -1 is not counted.
    """
    size, group = cluster.num_devices, cluster.devices_per_node
    cells = num_steps * size
    device_KT = np.ascontiguousarray(devices.T)
    visits = visits & (step >= 0)
    end_cell_T, device_cell_KT = np.maximum(step, 0) * size + end, step * size + device_KT
    ports_C2 = []
    for link in link_classes(cluster):
        of_class_KT = visits
        if cluster.num_nodes > 1:
            same_KT = device_KT // group == end // group
            of_class_KT = visits & (same_KT if link == "intra" else ~same_KT)
        at_end = np.bincount(end_cell_T, of_class_KT.sum(axis=0), cells).astype(np.int64)
        at_device = np.bincount(device_cell_KT[of_class_KT], minlength=cells)
        ports_C2.append([at_end.reshape(num_steps, size), at_device.reshape(num_steps, size)])
    return np.array(ports_C2, dtype=np.int64).transpose(2, 0, 1, 3)


def sample_copies(
    copies: NDArray[Any], device: NDArray[np.integer], cluster: Cluster, first: Sequence[int] | Ints = (0,)
) -> NDArray[Any]:
    """Port copies (`port_copies`) of whole samples, each with all its tokens on one device, `[B, 2, 2, D]`: both
    classes.

    Parameters
    ----------
    copies
        Of each sample with every device, `[I, D]`: counted, or expected.
    device
        Where each sample is, `[I]`.
    first
        Where the samples of each step begin, `[B]`.
    """
    group, every_D = cluster.devices_per_node, np.arange(cluster.num_devices)
    step_I = np.repeat(np.arange(len(first)), np.diff([*first, len(copies)]))
    near_ID = every_D // group == device[:, None] // group
    number = np.result_type(copies, np.int64)
    ports_C2BD = np.zeros((len(CLASSES), 2, len(first), cluster.num_devices), number)
    for crosses_ID, ports_2BD in zip((near_ID & (every_D != device[:, None]), ~near_ID), ports_C2BD, strict=True):
        of_class_ID = copies * crosses_ID
        np.add.at(ports_2BD[0], (step_I, device), of_class_ID.sum(axis=1, dtype=number))
        ports_2BD[1] = np.add.reduceat(of_class_ID, first, dtype=number)
    return ports_C2BD.transpose(2, 0, 1, 3)
