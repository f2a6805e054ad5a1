"""Make the presets anew from aiconfigurator's tables: `python -m benchmarks.make_presets [TABLES]`."""

import base64
import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from moeplan.files import atomic_path
from moeplan.planner.figures import percent
from moeplan.profilers.fits.experts import ExpertSurface
from moeplan.profilers.fits.fit import Fit, Model
from moeplan.profilers.fits.laws import AlphaBeta
from moeplan.profilers.fits.roofline import Roofline
from moeplan.profilers.fits.surface import Surface
from moeplan.profilers.origin import Origin, now
from moeplan.profilers.presets.preset import PRESETS, Preset, file_name
from moeplan.profilers.profile import Profile
from moeplan.profilers.series import ELEMENT_BYTES, Series
from moeplan.profilers.tables import read_tables

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data" / "gpu-measurements"
DTYPES = ("bf16", "fp8", "fp8_block", "uint8")  # of the series kept; collectives that only move bytes are uint8
COMPUTE_SHARE, MEMORY_SHARE = 0.7, 0.8  # of the peaks, about what the tables' larger GEMMs reach
SLOWEST = 2.0  # how many times longer than the roofline attention is taken to last at most
STEP = 2.0**-8  # to which logs of seconds are rounded: by at most 0.2 %
UNLIMITED = 2**40  # of sizes: a roofline holds for any
TABLES = "NVIDIA aiconfigurator 095f58a, Apache-2.0"


def main(tables: Path) -> None:
    """Write every preset's file into the clone."""
    for name, preset in PRESETS.items():
        path = ROOT / "profilers" / "presets" / file_name(name)
        with atomic_path(path) as temporary:
            temporary.write_bytes(packed(preset_of(read_tables(tables, name), preset)))
        print(f"{path}: {path.stat().st_size:,} bytes")


def attention(preset: Preset, dtype: str, *, origin: int) -> Series:
    """Attention in a dtype by the roofline, its interval from the peaks themselves to `SLOWEST` times as long."""
    roofline = Roofline(
        flops=preset.flops[dtype],
        bytes_per_s=preset.bytes_per_s,
        width=ELEMENT_BYTES[dtype],
        compute_share=COMPUTE_SHARE,
        memory_share=MEMORY_SHARE,
    )
    fit = Fit(
        axes=Roofline.axes,
        model=roofline,
        alpha_beta=AlphaBeta(a_s=0.0, b_s=2 / (COMPUTE_SHARE * preset.flops[dtype])),
        held_out={},
        low_factor=min(COMPUTE_SHARE, MEMORY_SHARE),
        high_factor=SLOWEST,
        measured=dict.fromkeys(Roofline.axes, (0, UNLIMITED)),
    )
    return Series(case="attention", dtype=dtype, ranks=1, unit="macs", origin=origin, fit=fit)


def roofline_origin(preset: Preset) -> Origin:
    """Origin of the series of attention."""
    rates = ", ".join(f"{flops * 1e-12:,.0f} TFLOP/s {dtype}" for dtype, flops in preset.flops.items())
    name = (
        f"attention by a roofline, not measured: {percent(COMPUTE_SHARE)} of {rates}, {percent(MEMORY_SHARE)} of"
        f" {preset.bytes_per_s * 1e-12:g} TB/s ({preset.source})"
    )
    return Origin(kind="described", created_at=now(), name=name)


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
    rooflines = [attention(preset, dtype, origin=1) for dtype in preset.flops]
    return Profile.make(
        origins=(origin.model_copy(update={"name": f"{origin.name} ({TABLES})"}), roofline_origin(preset)),
        cluster=tables.cluster,
        link_origins=tables.link_origins,
        series={series.key: series for series in (*kept, *rooflines)},
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


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)
