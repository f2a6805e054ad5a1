"""What a trace and a plan know of the model they are about."""

from dataclasses import dataclass
from typing import ClassVar

from ..errors import InputError

__all__ = ["Attention", "ModelSpec"]

NOT_ROUTED = 65_535  # the id of a dropped or padded cell
MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The attention of a model; `kv_size` counts the elements of K and V together, a token and layer."""

    kv_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A Mixture-of-Experts model; None is unknown.

    Parameters
    ----------
    layer_ids
        The hidden layer of each MoE layer, ascending: `layer_ids[ordinal]`.
    num_experts, top_k
        Routed experts a layer and experts a token.
    hidden_size, ffn_size
        Elements of a token's hidden vector and of an expert's inner vector.
    dtype_bytes
        Bytes of an element as it travels between devices.
    """

    name: str
    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    num_hidden_layers: int | None = None
    num_mtp_layers: int | None = None
    num_expert_groups: int | None = None
    num_shared_experts: int | None = None
    hidden_size: int | None = None
    ffn_size: int | None = None
    dtype_bytes: int | None = None
    attention: Attention = Attention()

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.layer_ids, self.layer_ids[1:], strict=False))
        if not self.layer_ids or not ascending or self.layer_ids[0] < 0 or len(self.layer_ids) > MAX_LAYERS:
            raise InputError(
                f"model {self.name!r} with {len(self.layer_ids)} MoE layer ids; expected 1 to {MAX_LAYERS}, ascending"
            )
        if not 1 <= self.top_k <= self.num_experts < NOT_ROUTED:
            raise InputError(
                f"model {self.name!r} with {self.num_experts} experts, top-{self.top_k};"
                f" expected 1 <= top-k <= experts < {NOT_ROUTED}"
            )

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return len(self.layer_ids)
