"""The constants that PipeMoE publishes (section V-B, Fig. 6), in units of ours: seconds, bytes, multiply-adds.

And the MoE layers that it measures (Table IV), with the work that each gives a rank.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

__all__ = ["PRESETS", "Configuration", "Preset", "table_iv"]

A_GEMM_S = 6.19e-5
B_GEMM_S = 4.1e-14  # per byte of fp32 activations times H, as the paper counts n_e
FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The published constants of one cluster, under the names `optimal_degree` takes.

    Parameters
    ----------
    num_devices
        GPUs, four RTX 2080 Ti a node, 100 Gb/s InfiniBand.
    a_a, b_a
        Seconds to start an all-to-all, and seconds a byte.
    a_e, b_e
        Seconds to start an expert's two GEMMs, and seconds for both a multiply-add of one: twice a GEMM's (Eq. 14-15);
        the published slope is per byte of fp32, so four times that.
    note
        What is doubtful about them.
    """

    num_devices: int
    a_a: float
    b_a: float
    a_e: float = 2 * A_GEMM_S
    b_e: float = 2 * FP32_BYTES * B_GEMM_S
    source: str = "PipeMoE (Shi et al., INFOCOM 2023), Fig. 6"
    note: str = ""


PRESETS: Final[Mapping[str, Preset]] = MappingProxyType(
    {
        "rtx2080ti-16": Preset(
            num_devices=16,
            a_a=1.72e-5,
            b_a=2.96e-10,
            note="as printed; a_a is probably a slip (for 1.72e-4?): the authors' public solver.py has 5.70e-4",
        ),
        "rtx2080ti-32": Preset(num_devices=32, a_a=2.09e-4, b_a=3.54e-10),
        "rtx2080ti-64": Preset(num_devices=64, a_a=7.83e-4, b_a=3.84e-10),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """An MoE layer as Table IV describes it.

    Parameters
    ----------
    batch, length
        Samples on a device, and tokens of each: B, L.
    hidden, ffn
        Model and expert size: M, H.
    local_experts
        E / P. It has no effect on either quantity below: more experts on a device share the same tokens.
    """

    batch: int
    length: int
    hidden: int
    ffn: int
    local_experts: int

    def dispatched_bytes(self, *, top_k: int = 1, capacity_factor: float = 1.0, element_bytes: int = 4) -> float:
        """n_d: bytes a rank dispatches, k cap B L M elements."""
        return element_bytes * top_k * capacity_factor * self.batch * self.length * self.hidden

    def multiply_adds(self, *, top_k: int = 1, capacity_factor: float = 1.0) -> float:
        """n_e: multiply-adds of one of the experts' two GEMMs, k cap B L M H."""
        return top_k * capacity_factor * self.batch * self.length * self.hidden * self.ffn


def table_iv() -> Iterator[Configuration]:
    """The 288 configurations a number of GPUs is measured with."""
    sizes = itertools.product((2, 4, 8), (512, 1024, 2048), (1024, 2048, 4096, 8192), (1024, 2048, 4096, 8192), (1, 2))
    for batch, length, ffn, hidden, local_experts in sizes:
        yield Configuration(batch=batch, length=length, hidden=hidden, ffn=ffn, local_experts=local_experts)
