"""Published tables of measurements, for hardware that one does not have."""

from .read import read_tables

__all__ = ["read_tables"]
