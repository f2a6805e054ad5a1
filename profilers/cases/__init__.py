"""The cases a profile measures, in order; every list of them derives from this one."""

from .attended import Attended
from .attention import Attention
from .case import Case
from .exchange import AllGather, AllToAll, UnevenAllToAll
from .expert_ffn import ExpertFfn
from .fp8_rows import Fp8Rows
from .gemm import Gemm
from .permutation import Permutation
from .point_to_point import PointToPoint
from .reduction import AllReduce, ReduceScatter
from .routed_block import RoutedBlock
from .routed_exchange import RoutedExchange
from .router import Router

__all__ = ["CASES", "PLANNED"]

_ALONE: tuple[Case, ...] = (
    Gemm(),
    ExpertFfn(),
    RoutedBlock(),
    Attention(),
    Attended(),
    Router(),
    Permutation(),
    Fp8Rows(),
)
_EXCHANGES: tuple[Case, ...] = (AllToAll(), UnevenAllToAll(), RoutedExchange(), AllGather())
_TOGETHER: tuple[Case, ...] = (*_EXCHANGES, AllReduce(), ReduceScatter(), PointToPoint())

CASES: dict[str, Case] = {case.name: case for case in (*_ALONE, *_TOGETHER)}
#: What planning reads: costs of a step, links and islands; the others are measured by `profile --full` only
PLANNED: tuple[Case, ...] = tuple(
    CASES[name]
    for name in (
        "routed_block",
        "attention",
        "attended",
        "fp8_rows",
        "all_to_all",
        "routed_exchange",
        "all_gather",
        "point_to_point",
    )
)
