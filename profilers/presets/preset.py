"""A preset: the profile of a GPU by published tables, with attention by a roofline of its data sheet.

`python -m benchmarks.make_presets` writes the files beside this one.
"""

import base64
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files

import numpy as np

from ...errors import UsageError
from ..fits.experts import ExpertSurface
from ..fits.fit import Fit, Model
from ..fits.laws import AlphaBeta
from ..fits.roofline import Roofline
from ..fits.surface import Surface
from ..origin import Origin, now
from ..profile import Profile, parse
from ..series import ELEMENT_BYTES, Series

DTYPES = ("bf16", "fp8", "fp8_block", "uint8")  # of the series kept; collectives that only move bytes are uint8
COMPUTE_SHARE, MEMORY_SHARE = 0.7, 0.8  # of the peaks, about what the tables' larger GEMMs reach
SLOWEST = 2.0  # how many times longer than the roofline attention is taken to last at most
STEP = 2.0**-8  # to which logs of seconds are rounded: by at most 0.2 %
UNLIMITED = 2**40  # of sizes: a roofline holds for any
TABLES = "NVIDIA aiconfigurator 095f58a, Apache-2.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A GPU's data sheet; what was measured of it is in the file of this name."""

    name: str  #: As the tables name the system
    device: str
    memory_gb: int
    #: flops, bytes_per_s: peak FLOP/s of dense products by dtype, and of the memory
    flops: Mapping[str, float]
    bytes_per_s: float
    source: str

    def attention(self, dtype: str, *, origin: int) -> Series:
        """Attention in a dtype by the roofline, its interval from the peaks themselves to `SLOWEST` times as long."""
        roofline = Roofline(
            flops=self.flops[dtype],
            bytes_per_s=self.bytes_per_s,
            width=ELEMENT_BYTES[dtype],
            compute_share=COMPUTE_SHARE,
            memory_share=MEMORY_SHARE,
        )
        fit = Fit(
            axes=Roofline.axes,
            model=roofline,
            alpha_beta=AlphaBeta(a_s=0.0, b_s=2 / (COMPUTE_SHARE * self.flops[dtype])),
            held_out={},
            low_factor=min(COMPUTE_SHARE, MEMORY_SHARE),
            high_factor=SLOWEST,
            measured=dict.fromkeys(Roofline.axes, (0, UNLIMITED)),
        )
        return Series(case="attention", dtype=dtype, ranks=1, unit="macs", origin=origin, fit=fit)

    @property
    def roofline_origin(self) -> Origin:
        """Origin of the series of attention."""
        rates = ", ".join(f"{flops * 1e-12:,.0f} TFLOP/s {dtype}" for dtype, flops in self.flops.items())
        name = (
            f"attention by a roofline, not measured: {COMPUTE_SHARE:.0%} of {rates}, {MEMORY_SHARE:.0%} of"
            f" {self.bytes_per_s * 1e-12:g} TB/s ({self.source})"
        )
        return Origin(kind="described", created_at=now(), name=name)


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


def preset_of(tables: Profile, preset: Preset) -> Profile:
    """What a preset keeps of its system's tables (`tables.read_tables`), and attention by its roofline.

    Notes
    -----
    Kept are the series in `DTYPES`, with logs of seconds rounded to `STEP`, so that the file packs well.
    """
    (origin,) = tables.origins
    kept = [
        series.model_copy(update={"fit": None if series.fit is None else _rounded(series.fit)})
        for series in tables.series.values()
        if series.dtype in DTYPES
    ]
    attention = [preset.attention(dtype, origin=1) for dtype in preset.flops]
    return Profile.make(
        origins=(origin.model_copy(update={"name": f"{origin.name} ({TABLES})"}), preset.roofline_origin),
        cluster=tables.cluster,
        link_origins=tables.link_origins,
        series={series.key: series for series in (*kept, *attention)},
    )


def packed(profile: Profile) -> bytes:
    """The bytes of a preset's file."""
    text = json.dumps(profile.model_dump(mode="json"), separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode(), compresslevel=9, mtime=0)


def _rounded(fit: Fit) -> Fit:
    """The fit with a surface's logs rounded."""
    model: Model = fit.model
    if isinstance(model, Surface):
        model = _rounded_surface(model)
    elif isinstance(model, ExpertSurface):
        model = replace(model, ratio=_rounded_surface(model.ratio))
    return replace(fit, model=model)


def _rounded_surface(surface: Surface) -> Surface:
    logs = np.frombuffer(base64.b64decode(surface.log_seconds), dtype="<f4")
    return replace(
        surface, log_seconds=base64.b64encode((np.round(logs / STEP) * STEP).astype("<f4").tobytes()).decode()
    )
