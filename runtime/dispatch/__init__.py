"""Dispatch models: how the tokens of a spread model travel between ranks, one row each."""

from collections.abc import Mapping

from ..decisions import DispatchModel
from .coherent import CoherentDispatch
from .dispatch import Dispatch
from .migrating import MigratingDispatch
from .standard import StandardDispatch

__all__ = ["DISPATCHES"]

DISPATCHES: Mapping[DispatchModel, type[Dispatch]] = {
    "standard": StandardDispatch,
    "coherent": CoherentDispatch,
    "migrating": MigratingDispatch,
}
