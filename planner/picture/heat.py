"""Heat map: a table of numbers as colours, drawn as an image with a pixel a cell."""

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...solvers.arrays import Floats
from .axis import Axis, frame, ordinals, short
from .svg import LINE, SIGN, SMALL, WIDE, Picture, head, text

MAX_CELLS = 400_000  # of all maps of a section: half a megabyte of the page at most
RAMP = ((0, 247, 250, 255), (0.25, 190, 213, 245), (0.5, 107, 158, 232), (0.75, 37, 99, 216), (1, 12, 34, 94))


@dataclass(frozen=True, slots=True, eq=False)
class Heat(Picture):
    """A table of numbers as colours, from 0 to a `top` that several of them share."""

    title: str
    table: NDArray[Any]  #: `[R, C]`
    top: float
    x: Axis = field(default_factory=Axis)
    y: Axis = field(default_factory=Axis)
    unit: str = ""
    borders: Sequence[float] = ()  #: Rows and columns before which a line is drawn
    small: bool = False

    @property
    def width(self) -> int:  # type: ignore[override]
        """Units."""
        return SMALL if self.small else WIDE

    def content(self) -> tuple[str, float]:
        """Elements of an SVG, and their height."""
        num_rows, num_columns = self.table.shape
        content, top = head(self.title, ())
        x, y = (replace(axis, ends=(0.0, float(size))) for axis, size in ((self.x, num_columns), (self.y, num_rows)))
        left, right = 0.0, self.width - 8.0
        if not self.small:
            x, y = (
                replace(one, ticks=[(at + 0.5, name) for at, name in one.ticks or ordinals(size)])
                for one, size in ((x, num_columns), (y, num_rows))
            )
            left = 8 + SIGN * max((len(words) for _, words in y.ticks), default=0)
            if y.title:
                content += text(0, top + 10, y.title, "s")
                top += LINE
        side = right - left
        bottom = top + (side if num_rows == num_columns else min(max(11.0 * num_rows, 90), side))
        across, down = x.place(self.borders, left, right), y.place(self.borders, top, bottom)
        content += _image(self.table / (self.top or 1.0), left, top, side, bottom - top)
        lines = "".join(f"M{at:.1f} {top:.1f}V{bottom:.1f}" for at in across)
        lines += "".join(f"M{left:.1f} {at:.1f}H{right:.1f}" for at in down)
        content += f'<path class="r" stroke-width="{0.35 if self.small else 0.6}" d="{lines}"/>' if lines else ""
        if self.small:
            return content, bottom + 4
        content += frame(x, replace(y, falling=True), (left, right), (top, bottom), grid=False)
        ramp = bottom + 2 * LINE + 6
        content += _image(np.arange(256)[None] / 255, right - 120, ramp, 80, 8)
        content += text(right - 124, ramp + 8, "0", "s", "end") + text(right - 36, ramp + 8, short(self.top), "s")
        return content + text(0, ramp + 8, self.unit, "s"), ramp + LINE


def group_size(size: int, num_heats: int) -> int:
    """Neighbours that share a row and a column, so that all maps of a section together stay small."""
    return ceil(size / max(1, isqrt(MAX_CELLS // max(1, num_heats))))


def grouped(table: NDArray[Any], size: int) -> Floats:
    """Sums of so many neighbouring rows and columns, of the last two axes."""
    rows, columns = (np.arange(0, length, size) for length in table.shape[-2:])
    sums = np.add.reduceat(np.add.reduceat(table.astype(np.float64), rows, axis=-2), columns, axis=-1)
    return np.asarray(sums)


def _image(shares: NDArray[Any], x: float, y: float, width: float, height: float) -> str:
    """Shares of 0 to 1 as an image of colours, a pixel a cell."""
    at, *channels = np.array(RAMP).T
    levels = np.linspace(0, 1, 256)
    palette = np.stack([np.interp(levels, at, channel) for channel in channels], axis=1).round().astype(np.uint8)
    pixels = (np.clip(np.nan_to_num(shares), 0, 1) * 255).round().astype(np.uint8)
    rows = np.concatenate([np.zeros((len(pixels), 1), np.uint8), pixels], axis=1)  # each begins with its filter
    head = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 3, 0, 0, 0)
    chunks = (
        (b"IHDR", head),
        (b"PLTE", palette.tobytes()),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    )
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    data = base64.b64encode(png).decode()
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" preserveAspectRatio="none"'
    return f'<image {place} href="data:image/png;base64,{data}"/>'
