"""Replica rules as lookup tables: the device of the replica that a token uses.

Legend: E experts; D devices; N nodes; R most candidates; T tokens; K experts per token.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .arrays import Bools
from .placement import BY_STEP, Placement

ReplayRule = Literal["even", "nearest", "static", "round_robin", "quota", "lp"]


@dataclass(frozen=True, slots=True)
class ReplicaTable:
    """The devices that a token may use for each expert of one layer, by where the token is.

    `nearest` offers a token its own device if that holds the expert, else the holders on its node, else all holders;
    `even` offers all holders always. Among n candidates a token takes number (sample + position) mod n.

    Two rules are engines' own, to replay what they do. `static` (SGLang) offers what `nearest` does, of which all
    tokens of a device take one and the same: the first on its node, where there are fewer there than in all; for the
    other devices SGLang draws among the n, alike often in the mean, and here the i-th of them takes number (i + expert)
    mod n. `round_robin` (TensorRT-LLM) offers all holders, of which a token on device d takes number
    (sample + position + d + expert) mod n: the engine counts the tokens of each expert for itself, so that a token's
    experts take turns of their own.
    """

    #: int32 `[E, N or 1, R]`: candidates by the token's node (an axis of 1: all nodes alike), ascending, -1 behind.
    #: Static: by its device, `[E, D, 1]`.
    devices: NDArray[np.int32]
    count: NDArray[np.int32]  #: int32 `[E, N or 1]` (static: `[E, D]`), at least 1
    #: Whether a device holds the expert and is therefore taken by its own tokens, `[E, D]`; None: never
    own: Bools | None
    devices_per_node: int  #: D / N; static: 1
    rotated: bool = False  #: Whether its device and the expert are added to a token's turn

    @classmethod
    def of(
        cls, placement: Placement, layer: int, devices_per_node: int, rule: ReplayRule | None = None
    ) -> "ReplicaTable":
        """The table of one layer of a placement by its own rule, or another; UsageError for one that goes by steps."""
        rule = placement.replica_rule.value if rule is None else rule
        if rule in BY_STEP and placement.has_replicas:
            raise UsageError(
                f"replica rule {rule} goes by all counts of a step, and here each token chooses for itself; expected"
                " even or nearest"
            )
        if rule == "static" and placement.has_replicas:
            return cls._static(placement, layer, devices_per_node)
        held_ED = placement.holds(layer)
        holders_E = [np.flatnonzero(held_D) for held_D in held_ED]
        nearest = rule == "nearest" and placement.has_replicas
        num_nodes = placement.num_devices // devices_per_node if nearest and devices_per_node > 1 else 1
        count_EN = np.repeat([[len(held)] for held in holders_E], num_nodes, axis=1).astype(np.int32)
        devices_ENR = np.full((len(held_ED), num_nodes, count_EN.max()), -1, dtype=np.int32)
        for expert, held in enumerate(holders_E):
            devices_ENR[expert, :, : len(held)] = held
            for node in np.unique(held // devices_per_node) if num_nodes > 1 else ():
                near = held[held // devices_per_node == node]
                devices_ENR[expert, node] = -1
                devices_ENR[expert, node, : len(near)] = near
                count_EN[expert, node] = len(near)
        return cls(devices_ENR, count_EN, held_ED if nearest else None, devices_per_node, rule == "round_robin")

    @classmethod
    def _static(cls, placement: Placement, layer: int, devices_per_node: int) -> "ReplicaTable":
        """The one device that each device's tokens use for each expert."""
        near = cls.of(placement, layer, devices_per_node, "nearest")
        held_ED = placement.holds(layer)
        device_D, expert_E1 = np.arange(held_ED.shape[1]), np.arange(len(held_ED))[:, None]
        place_D = device_D // devices_per_node if near.count.shape[1] > 1 else 0 * device_D
        count_ED = near.count[expert_E1, place_D]
        draws_ED = ~held_ED & (count_ED == held_ED.sum(axis=1, keepdims=True))  # others: the first on their node
        turn_ED = np.where(draws_ED, np.cumsum(draws_ED, axis=1) - 1 + expert_E1, 0)
        chosen_ED = near.devices[expert_E1, place_D, turn_ED % count_ED]
        chosen_ED = np.where(held_ED, device_D, chosen_ED).astype(np.int32)
        return cls(chosen_ED[:, :, None], np.ones(held_ED.shape, np.int32), None, 1)

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
        num_experts, num_nodes = self.count.shape
        routed_TK = ids < num_experts
        e_TK = np.where(routed_TK, ids, 0).astype(np.int64)
        n_T1 = home[:, None] // self.devices_per_node if num_nodes > 1 else np.zeros((1, 1), dtype=np.int64)
        turn_TK = (turn + home)[:, None] + e_TK if self.rotated else turn[:, None]
        if self.devices.shape[2] == 1:
            chosen_TK = self.devices[e_TK, n_T1, 0]
        else:
            chosen_TK = self.devices[e_TK, n_T1, turn_TK % self.count[e_TK, n_T1]]
        if self.own is not None:
            chosen_TK = np.where(self.own[e_TK, home[:, None]], home[:, None], chosen_TK)
        return np.where(routed_TK, chosen_TK, -1).astype(np.int32, copy=False)

    def seen_from(self, home: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The candidates `[E, R]` and their number `[E]` for tokens on device `home`."""
        node = home // self.devices_per_node if self.count.shape[1] > 1 else 0
        devices_ER, count_E = self.devices[:, node].copy(), self.count[:, node].copy()
        if self.own is not None:
            devices_ER[self.own[:, home]] = -1
            devices_ER[self.own[:, home], 0] = home
            count_E[self.own[:, home]] = 1
        return devices_ER, count_E
