"""The cases a profile measures, in order; every list of them derives from this one."""

from .attention import Attention
from .case import Case
from .exchange import AllGather, AllToAll, UnevenAllToAll
from .expert_ffn import ExpertFfn
from .gemm import Gemm
from .permutation import Permutation
from .point_to_point import PointToPoint
from .reduction import AllReduce, ReduceScatter
from .router import Router

__all__ = ["CASES"]

_ALONE: tuple[Case, ...] = (Gemm(), ExpertFfn(), Attention(), Router(), Permutation())
_TOGETHER: tuple[Case, ...] = (AllToAll(), UnevenAllToAll(), AllGather(), AllReduce(), ReduceScatter(), PointToPoint())

CASES: dict[str, Case] = {case.name: case for case in (*_ALONE, *_TOGETHER)}
