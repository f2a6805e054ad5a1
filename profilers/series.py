"""A series: the measurements of one case in one dtype on one set of ranks, and the model fitted to them."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import InputError
from .fits.fit import Fit
from .measurement import PAIR, Measurement

LinkKind = Literal["intra", "inter"]
ELEMENT_BYTES: Mapping[str, int] = {  # by dtype; of each width, the dtype that models use most first
    "fp8": 1,
    "fp8_block": 1,
    "uint8": 1,
    "int8": 1,
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
}


class Series(BaseModel):
    """The measurements of a case in one dtype."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    case: str  #: The case's name
    dtype: str  #: Of the elements, one of `ELEMENT_BYTES`
    ranks: Annotated[int, Field(ge=1)]  #: Ranks that take part in a call; 1: each alone
    #: The link class the call crosses: "intra" (inside a node), "inter" (between nodes); None where it crosses none
    link: LinkKind | None = None
    unit: Literal["bytes", "macs"]  #: The unit of work: bytes through a rank's port, or multiply-adds ("macs")
    origin: Annotated[int, Field(ge=0)] = 0  #: Index of the profile's origin that it came from
    measurements: tuple[Measurement, ...] = ()  #: In the order taken; empty where a published table holds them
    fit: Fit | None = None  #: None for fewer than two sizes, and in what a killed run left

    @property
    def key(self) -> str:
        """The name of the series in a profile."""
        return series_key(self.case, self.dtype, self.ranks, self.link)

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if not (self.case + self.dtype).isprintable():
            raise InputError("a series whose case or dtype does not print; expected names")
        axes = {frozenset(one.size) for one in self.measurements}
        fitted = {frozenset(of - set(PAIR)) for of in axes} | ({frozenset(self.fit.axes)} if self.fit else set())
        if len(axes) > 1 or len(fitted) > 1:
            raise InputError("a series whose sizes have different axes, or others than its fit; expected the same")
        if len({tuple(sorted(one.size.items())) for one in self.measurements}) != len(self.measurements):
            raise InputError("a series that measured a size twice; expected each once")
        return self


def series_key(case: str, dtype: str, ranks: int = 1, link: LinkKind | None = None) -> str:
    """`case/dtype`, `@ranks` where several take part, `/link` where one is crossed: `all_to_all/uint8@4/intra`."""
    return f"{case}/{dtype}" + (f"@{ranks}" if ranks > 1 else "") + (f"/{link}" if link else "")
