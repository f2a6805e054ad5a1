"""How figures are shown, on screen and on pages alike."""

from .study import Row

NONE = "-"


def shown(value: float | None, name: str = "") -> str:
    """A figure by the end of its name: ", %" a share, ", s" seconds, else a number of four digits."""
    if value is None:
        return NONE
    if name.endswith(", %"):
        return f"{value:.1%}"
    if name.endswith(", s"):
        factor, unit = (1, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "us")
        return f"{value * factor:#.3g}".rstrip(".") + f" {unit}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"


def cells(row: Row, quality: str) -> list[str]:
    """The columns that every table has, from instance to ratio."""
    return [
        row.instance,
        row.method,
        shown(row.quality, quality),
        shown(row.bound, quality),
        shown(row.seconds, ", s"),
        NONE if row.memory_bytes is None else _megabytes(row.memory_bytes / 1e6),
        NONE if row.ratio is None else _times(row.ratio),
    ]


def told(row: Row) -> str:
    """A row's further figures in words."""
    return ", ".join(_told(name, value) for name, value in row.more.items())


def _told(name: str, value: float) -> str:
    words, _, unit = name.partition(", ")
    return f"{words} {shown(value, name)}" + (f" {unit}" if unit not in ("", "%", "s") else "")


def _megabytes(size: float) -> str:
    return f"{size:,.0f}" if size >= 10 else f"{size:.2g}"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}" if ratio >= 0.1 else f"{ratio:.4f}"
