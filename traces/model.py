"""Model of a trace and of a plan, as far as they describe it."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ..errors import InputError

NOT_ROUTED = 65_535  # the id of a dropped or padded cell
MAX_LAYERS = 4096
MAX_NAME = 256  # characters of a name that reports show
MAX_SIZE = 2**31 - 1
EXPERT_MATRICES = 3  # each hidden x ffn: gate, up and down
STATE_BYTES = 16  # per parameter: weight and gradient (2 each), a master copy and two states of Adam (4 each)
MAY_BE_ZERO = ("num_mtp_layers", "num_shared_experts")


def _check_sizes(spec: "Latent | Attention | ModelSpec") -> None:
    """Refuse a size below 1 (a count of parts that a model may lack: below 0) or absurd."""
    for name in (field.name for field in fields(spec)):
        size, least = getattr(spec, name), int(name not in MAY_BE_ZERO)
        if isinstance(size, int) and not least <= size <= MAX_SIZE:
            raise InputError(f"model with {name} {size}; expected {least} to {MAX_SIZE:,}")


def _written_where_known(*names: str) -> "classmethod[Any, Any, Any]":
    """Schema of pydantic whose fields of these names are written only where known: older files and hashes stay."""

    def schema_of(cls: Any, source: Any, handler: Any) -> Any:
        """Schema of `source`, by which fields of these names that are None are not written."""
        from pydantic_core import core_schema

        def known(spec: Any, write: Any) -> Any:
            return {name: value for name, value in write(spec).items() if name not in names or value is not None}

        schema = handler(source)
        return schema | {"serialization": core_schema.wrap_serializer_function_ser_schema(known, schema=schema)}

    return classmethod(schema_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Latent attention (MLA): ranks of its projections, and elements of a head.

    A token is cached as `kv_rank` elements, of which every head's keys and values are products, and `rope_size` more
    that all heads share.
    """

    kv_rank: int
    q_rank: int | None = None  #: None: queries are projected from hidden vectors at once
    #: head_size, rope_size, value_size: elements of a head's queries and keys without and with position, and of values
    head_size: int
    rope_size: int
    value_size: int

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        _check_sizes(self)

    def weights(self, num_heads: int, hidden_size: int) -> int:
        """Elements of all projections of a layer."""
        queries, values = num_heads * (self.head_size + self.rope_size), num_heads * self.value_size
        of_queries = hidden_size * queries if self.q_rank is None else self.q_rank * (hidden_size + queries)
        down, up = hidden_size * (self.kv_rank + self.rope_size), self.kv_rank * num_heads * self.head_size
        return of_queries + down + up + self.kv_rank * values + values * hidden_size

    def q_size(self, num_heads: int, *, absorbed: bool) -> float:
        """Multiply-adds of a token with one of its context, halved: half for the score, half for the value.

        `absorbed`: in the latent space, so that the cache is read as it is; else by head.
        """
        score, value = (self.kv_rank, self.kv_rank) if absorbed else (self.head_size, self.value_size)
        return num_heads * (score + self.rope_size + value) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The attention of a model; `kv_size` counts the elements of K and V together, a token and layer."""

    kv_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    latent: Latent | None = None  #: None: projections are of full rank, or unknown

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    __get_pydantic_core_schema__ = _written_where_known("latent")

    def __post_init__(self) -> None:
        _check_sizes(self)

    @property
    def q_size(self) -> float | None:
        """The elements of a token's queries, whose heads are as wide as those of K and V; None is unknown."""
        if self.kv_size is None or self.num_heads is None or self.num_kv_heads is None:
            return None
        return self.kv_size / 2 / self.num_kv_heads * self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A Mixture-of-Experts model; None is unknown."""

    name: str
    layer_ids: tuple[int, ...]  #: The hidden layer of each MoE layer, ascending: `layer_ids[ordinal]`
    #: num_experts, top_k: routed experts per layer and experts per token
    num_experts: int
    top_k: int
    num_hidden_layers: int | None = None
    num_mtp_layers: int | None = None
    num_expert_groups: int | None = None
    num_shared_experts: int | None = None
    #: hidden_size, ffn_size: elements of a token's hidden vector and of an expert's inner vector
    hidden_size: int | None = None
    ffn_size: int | None = None
    dtype_bytes: int | None = None  #: Bytes of an element as it travels between devices
    attention: Attention = Attention()
    top_k_groups: int | None = None  #: Of `num_expert_groups`, those that a token may choose experts from

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    __get_pydantic_core_schema__ = _written_where_known("top_k_groups")

    def __post_init__(self) -> None:
        if not (self.name.isprintable() and len(self.name) <= MAX_NAME):
            raise InputError(
                f"model name {self.name[:40]!r} of {len(self.name):,} characters; expected at most {MAX_NAME},"
                " all printable"
            )
        ascending = all(a < b for a, b in zip(self.layer_ids, self.layer_ids[1:], strict=False))
        few = 1 <= len(self.layer_ids) <= MAX_LAYERS
        if not (few and ascending and self.layer_ids[0] >= 0 and self.layer_ids[-1] <= MAX_SIZE):
            raise InputError(
                f"model {self.name!r} with {len(self.layer_ids)} MoE layer ids; expected 1 to {MAX_LAYERS}, ascending"
                f" from 0 to at most {MAX_SIZE:,}"
            )
        if not 1 <= self.top_k <= self.num_experts < NOT_ROUTED:
            raise InputError(
                f"model {self.name!r} with {self.num_experts} experts, top-{self.top_k};"
                f" expected 1 <= top-k <= experts < {NOT_ROUTED}"
            )
        _check_sizes(self)

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return len(self.layer_ids)

    @property
    def copy_bytes(self) -> int | None:
        """Bytes of a token's hidden vector as it travels between devices; None where a size of it is unknown."""
        return None if self.hidden_size is None or self.dtype_bytes is None else self.hidden_size * self.dtype_bytes

    @property
    def expert_bytes(self) -> int | None:
        """Bytes of an expert's weights, in elements of the model's dtype; None where a size is unknown."""
        if self.ffn_size is None or self.copy_bytes is None:
            return None
        return EXPERT_MATRICES * self.ffn_size * self.copy_bytes

    @property
    def expert_state_bytes(self) -> int | None:
        """Bytes of an expert that moves with its optimizer state; None where a size is unknown."""
        if self.expert_bytes is None or self.dtype_bytes is None:
            return None
        return self.expert_bytes // self.dtype_bytes * STATE_BYTES
