"""A page: figures and words in one HTML file that needs no network."""

import html
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...files import atomic_path

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["Section", "write_page"]

# The browser itself is told to fetch nothing, whatever the drawing library would like to.
POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin: 2em 0 0 } p { margin: .3em 0 }
"""
CONFIG = {"displaylogo": False, "responsive": True}


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, a few words and a figure."""

    title: str
    text: str
    figure: "Figure"


def write_page(path: str | os.PathLike[str], title: str, text: str, sections: Iterable[Section]) -> None:
    """Write a page, atomically; the drawing library is in it once, 4.5 MB.

    Raises
    ------
    StorageError
        It cannot be written.
    """
    from plotly.offline import get_plotlyjs

    body = "".join(_html(section, number) for number, section in enumerate(sections))
    page = (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style><script>{get_plotlyjs()}</script></head>\n"
        f"<body><h1>{html.escape(title)}</h1><p>{html.escape(text)}</p>\n{body}</body></html>\n"
    )
    with atomic_path(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _html(section: Section, number: int) -> str:
    """A section as HTML; figures are numbered, so that equal contents give equal bytes."""
    from plotly.io import to_html

    figure = section.figure.update_layout(template="plotly_white", margin={"t": 30, "r": 20})
    drawn = to_html(figure, full_html=False, include_plotlyjs=False, config=CONFIG, div_id=f"figure-{number}")
    return f"<h2>{html.escape(section.title)}</h2><p>{html.escape(section.text)}</p>\n{drawn}\n"
