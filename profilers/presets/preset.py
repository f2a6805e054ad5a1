"""A preset: the profile of a GPU by published tables, with attention by a roofline of its data sheet.

`python -m benchmarks.make_presets` writes the files beside this one.
"""

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from ...errors import UsageError
from ..profile import Profile, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Data sheet of a GPU, whose measurements are in the file of this name."""

    name: str  #: As the tables name the system
    device: str
    memory_gb: int
    #: flops, bytes_per_s: peak FLOP/s of dense products by dtype, and of the memory
    flops: Mapping[str, float]
    bytes_per_s: float
    source: str


_HOPPER = {"bf16": 989e12, "fp8": 1979e12}  # without sparsity
_PRESETS = (
    Preset(
        name="h100_sxm",
        device="NVIDIA H100 SXM",
        memory_gb=80,
        flops=_HOPPER,
        bytes_per_s=3.35e12,
        source="NVIDIA's H100 data sheet",
    ),
    Preset(
        name="h200_sxm",
        device="NVIDIA H200 SXM",
        memory_gb=141,
        flops=_HOPPER,
        bytes_per_s=4.8e12,
        source="NVIDIA's H200 data sheet",
    ),
)
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _PRESETS}


def load_preset(name: str) -> Profile:
    """The profile of a preset: one node of the GPUs measured.

    Raises
    ------
    UsageError
        There is no such preset; those there are are named.
    """
    if name not in PRESETS:
        raise UsageError(f"preset {name!r}; there are {', '.join(PRESETS)} (--preset list says what they hold)")
    packed = files(__package__).joinpath(file_name(name)).read_bytes()
    return parse(json.loads(gzip.decompress(packed)), file_name(name))


def file_name(name: str) -> str:
    """The file of a preset in this folder."""
    return f"{name}.json.gz"
