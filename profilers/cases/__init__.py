"""The cases a profile measures, in order; every list of them derives from this one."""

from ..harness import Case
from .all_to_all import AllToAll
from .gemm import Gemm

__all__ = ["CASES"]

CASES: dict[str, Case] = {case.name: case for case in (Gemm(), AllToAll())}
