"""The MoE layers that PipeMoE measures (Table IV), and the work each gives a rank."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Configuration", "table_iv"]


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
