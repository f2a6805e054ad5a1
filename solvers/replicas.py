"""Which replica of an expert a token uses: the replica rules as lookup tables.

Legend: E experts; D devices; R most candidates; T tokens; K experts a token.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .placement import Placement, ReplicaRule

__all__ = ["ReplicaTable"]


@dataclass(frozen=True, slots=True)
class ReplicaTable:
    """The devices that a token may use for each expert of one layer, by where the token is.

    A token at device h uses `devices[e, h, (sample + position) mod count[e, h]]` for expert e. `nearest` offers the
    own device if it holds e, else the holders on the own node, else all holders; `even` offers all holders always
    (h is then an axis of length 1). Candidates ascend and are padded with -1.

    Parameters
    ----------
    devices
        int32 `[E, D or 1, R]`.
    count
        int32 `[E, D or 1]`, at least 1.
    """

    devices: NDArray[np.int32]
    count: NDArray[np.int32]

    @classmethod
    def of(cls, placement: Placement, layer: int, devices_per_node: int) -> "ReplicaTable":
        """The table of one layer of a placement."""
        held_ED = placement.holds(layer)
        offered_EHD = held_ED[:, None, :]
        if placement.replica_rule is ReplicaRule.NEAREST and placement.has_replicas:
            offered_EHD = _nearest(held_ED, devices_per_node)
        count_EH = offered_EHD.sum(axis=2, dtype=np.int32)
        order_EHR = np.argsort(~offered_EHD, axis=2, kind="stable")[:, :, : count_EH.max()]
        valid_EHR = np.arange(order_EHR.shape[2]) < count_EH[:, :, None]
        return cls(np.where(valid_EHR, order_EHR, -1).astype(np.int32), count_EH)

    def choose(
        self, ids: NDArray[np.integer], home: NDArray[np.integer], turn: NDArray[np.integer]
    ) -> NDArray[np.int32]:
        """The device of every routed cell, int32 `[T, K]`; -1 where `ids` names no expert.

        Parameters
        ----------
        ids
            Experts `[T, K]`; values of E and above are not routed.
        home
            The device each token is on, `[T]`.
        turn
            `sample + position` of each token, `[T]`.
        """
        num_experts, num_homes = self.count.shape
        routed_TK = ids < num_experts
        e_TK = np.where(routed_TK, ids, 0).astype(np.int64)
        h_T1 = home[:, None] if num_homes > 1 else np.zeros((1, 1), dtype=np.int64)
        if self.devices.shape[2] == 1:
            chosen_TK = self.devices[e_TK, h_T1, 0]
        else:
            chosen_TK = self.devices[e_TK, h_T1, turn[:, None] % self.count[e_TK, h_T1]]
        return np.where(routed_TK, chosen_TK, np.int32(-1))


def _nearest(held_ED: NDArray[np.bool_], devices_per_node: int) -> NDArray[np.bool_]:
    """Candidates `[E, H, D]` of the rule `nearest`."""
    num_devices = held_ED.shape[1]
    node_D = np.arange(num_devices) // devices_per_node
    own_HD = np.eye(num_devices, dtype=np.bool_)
    same_node_HD = node_D[:, None] == node_D
    offered_EHD = np.broadcast_to(held_ED[:, None, :], (len(held_ED), num_devices, num_devices))
    for wanted_HD in (same_node_HD, own_HD):  # the nearer one found last wins
        nearer_EHD = held_ED[:, None, :] & wanted_HD
        offered_EHD = np.where(nearer_EHD.any(axis=2, keepdims=True), nearer_EHD, offered_EHD)
    return offered_EHD
