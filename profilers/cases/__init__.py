"""The cases a profile measures, in order; every list of them derives from this one."""

from .all_gather import AllGather
from .all_reduce import AllReduce
from .all_to_all import AllToAll
from .attention import Attention
from .case import Case
from .expert_ffn import ExpertFfn
from .gemm import Gemm
from .permutation import Permutation
from .point_to_point import PointToPoint
from .reduce_scatter import ReduceScatter
from .router import Router
from .uneven_all_to_all import UnevenAllToAll

__all__ = ["CASES"]

_ALONE: tuple[Case, ...] = (Gemm(), ExpertFfn(), Attention(), Router(), Permutation())
_TOGETHER: tuple[Case, ...] = (
    AllToAll(),
    UnevenAllToAll(),
    AllGather(),
    AllReduce(),
    ReduceScatter(),
    PointToPoint(),
)

CASES: dict[str, Case] = {case.name: case for case in (*_ALONE, *_TOGETHER)}
