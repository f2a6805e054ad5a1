"""What others measured and published, beside what moeplan predicts of it."""

from collections.abc import Iterator

from ...study import Row, Settings, Study
from .page import page
from .published import Source, published

__all__ = ["STUDIES", "page"]


def _sources(settings: Settings) -> list[Source]:
    return published().sources[: 1 if settings.quick else None]


def _rows(source: Source) -> Iterator[Row]:
    for figure in source.figures:
        predicted = published().predicted(source, figure)
        more = {"measured": figure.measured, "error, %": predicted / figure.measured - 1}
        yield Row(source.name, figure.what, quality=predicted, more=more)


STUDIES = (
    Study(
        title="Published figures",
        quality="predicted",
        note="What moeplan predicts of figures that others measured. Set-ups, sources and assumptions:"
        " benchmarks/truth.yaml, and docs/truth.md.",
        instances=_sources,
        rows=_rows,
    ),
)
