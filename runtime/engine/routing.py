"""The device of each (token, expert): the solvers' replica tables as tensors, seen from one device.

Legend: E experts; R most candidates; T tokens; K experts a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...solvers.replicas import ReplicaTable

__all__ = ["Replicas", "RoutedTokens"]


@dataclass(frozen=True, slots=True)
class Replicas:
    """The devices that a token held by one device may use for each expert of a layer.

    Parameters
    ----------
    devices
        int64 `[E, R]`, ascending, padded with -1.
    count
        int64 `[E]`, at least 1.
    only
        The device of each expert, int64 `[E]`, where all have but one candidate.
    """

    devices: Tensor
    count: Tensor
    only: Tensor | None

    @classmethod
    def seen_from(cls, home: int, table: ReplicaTable, device: torch.device) -> "Replicas":
        """The candidates that `table` offers to tokens at `home`, as tensors on `device`."""
        devices_ER, count_E = map(torch.from_numpy, table.seen_from(home))
        devices_ER = devices_ER.to(device, torch.int64)
        only = devices_ER.flatten() if devices_ER.shape[1] == 1 else None
        return cls(devices_ER, count_E.to(device, torch.int64), only)

    def choose(self, ids_TK: Tensor, sample_T: Tensor, position_T: Tensor) -> Tensor:
        """The device of each token's experts, int64 `[T, K]`: candidates take turns by sample + position."""
        if self.only is not None:
            return self.only[ids_TK]
        return self.devices[ids_TK, (sample_T + position_T)[:, None] % self.count[ids_TK]]


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Experts that one layer's router chose for the tokens that this rank held.

    Parameters
    ----------
    sample, position
        Which tokens, int64 `[T]`.
    ids
        Their experts, int64 `[T, K]`, largest gate weight first.
    """

    sample: Tensor
    position: Tensor
    ids: Tensor
