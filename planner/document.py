"""A document: sections of text, tables and drawings, shown on a console or written as a page."""

import base64
import html
import json
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..files import atomic_path, check_target

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from rich.console import Console

# The browser itself is told to fetch nothing, whatever the drawing library would like to.
POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin: 2em 0 0 } p { margin: .3em 0 }
td, th { padding: 0 .8em 0 0; text-align: right; font-weight: normal } td:first-child { text-align: left }
"""
CONFIG = {"displaylogo": False, "responsive": True}
# The library and what it draws, compressed; signs of base 85 stand for 6.4 bits each.
UNPACK = """<script>
(async () => {{
  const signs = "{signs}", packed = "{packed}";
  const value = Object.fromEntries([...signs].map((sign, at) => [sign, at]));
  const bytes = new DataView(new ArrayBuffer(packed.length / 5 * 4));
  for (let at = 0; at < packed.length; at += 5) {{
    let word = 0;
    for (const sign of packed.slice(at, at + 5)) word = 85 * word + value[sign];
    bytes.setUint32(at / 5 * 4, word);
  }}
  const stream = new Blob([bytes.buffer.slice(0, {size})]).stream().pipeThrough(new DecompressionStream("deflate"));
  (0, eval)(await new Response(stream).text());
}})();
</script>
"""
SIGNS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"  # of base64.b85encode
GAP = 2  # signs between two columns


@dataclass(frozen=True, slots=True)
class Text:
    """Lines of text. Long ones wrap; after a `label     ` they wrap below the text."""

    lines: tuple[str, ...]

    @classmethod
    def of(cls, *lines: str) -> "Text":
        """The lines."""
        return cls(lines)

    def print(self, console: "Console") -> None:
        """Print on a console."""
        for line in self.lines:
            console.print(line)

    def html(self, name: str) -> str:
        """Paragraphs of a page."""
        return "".join(f"<p>{html.escape(line)}</p>" for line in self.lines) + "\n"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; the first of a table names the rows, and is to the left."""

    header: str
    cells: Sequence[str]

    @property
    def width(self) -> int:
        """Signs of the widest cell."""
        return max(map(len, (self.header, *self.cells)))


@dataclass(frozen=True, slots=True)
class Table:
    """Columns, the most important ones first."""

    columns: Sequence[Column]
    #: Whether a narrow screen shows all columns, in several tables; else it leaves the last ones out
    whole: bool = False
    note: str = ""  #: What is left out, and where it is; below

    def fitting(self, width: int) -> "list[Table]":
        """The columns as tables of so many signs at most, each with the rows' names and one column at least.

        Where all are shown, and they do not fit, names of more than half the width wrap.
        """
        names, *rest = self.columns
        named, tables = names.width, [[names]]
        if self.whole and named + sum(GAP + column.width for column in rest) > width:
            named = min(named, width // 2)
        for column in rest:
            needed = named + sum(GAP + one.width for one in (*tables[-1][1:], column))
            if needed > width and len(tables[-1]) > 1:
                if not self.whole:
                    break
                tables.append([names])
            tables[-1].append(column)
        return [Table(columns) for columns in tables]

    def print(self, console: "Console") -> None:
        """Print on a console, columns as far as it is wide; nothing without figures."""
        if len(self.columns) < 2:
            return
        from rich.table import Table as RichTable

        for number, table in enumerate(self.fitting(console.width)):
            if number:
                console.print()
            shown = RichTable(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="")
            names, *rest = table.columns
            room = console.width - sum(GAP + column.width for column in rest)
            shown.add_column(names.header, overflow="fold", max_width=max(room, 1))
            for column in rest:  # figures stay whole, names wrap
                shown.add_column(column.header, justify="right", no_wrap=True, min_width=column.width)
            for row in zip(*(column.cells for column in table.columns), strict=True):
                shown.add_row(*row)
            console.print(shown)
        if self.note:
            console.print(self.note)

    def html(self, name: str) -> str:
        """Table of a page."""
        head = "".join(f"<th>{html.escape(column.header)}</th>" for column in self.columns)
        rows = zip(*(column.cells for column in self.columns), strict=True)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        return f"<table><tr>{head}</tr>{body}</table>{note}\n"


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure of a page, as plotly has it; a console leaves it out."""

    make: "Callable[[], Figure | dict[str, Any]]"

    def print(self, console: "Console") -> None:
        """Print nothing."""

    def html(self, name: str) -> str:
        """Place of the drawing on a page, under a name that no other has there."""
        return f'<div id="{name}"></div>\n'

    def script(self, name: str) -> str:
        """Call that draws it in its place."""
        from plotly.graph_objects import Figure
        from plotly.io import to_json

        figure = Figure(self.make()).update_layout(template="plotly_white", margin={"t": 30, "r": 20})
        drawing = f"{{...{to_json(figure)}, config: {json.dumps(CONFIG)}}}"
        return f"Plotly.newPlot({json.dumps(name)}, {drawing});\n"


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a document."""

    title: str  #: Its heading on a page, and on a console where it is of the details
    body: Sequence[Text | Table | Drawing]
    verbose: bool = False  #: Whether a console shows it only when all details are asked for
    pointer: str = ""  #: The last line on a console that leaves details out


def drawn(title: str, text: str, figure: "Figure | dict[str, Any]") -> Section:
    """A section of a page: a few words and a figure."""
    return Section(title, (Text.of(text), Drawing(lambda: figure)))


def to_console(sections: Sequence[Section], console: "Console", *, verbose: bool = False) -> None:
    """Print a document, a blank line between two sections."""
    shown = [section for section in sections if section.body and (verbose or not section.verbose)]
    for number, section in enumerate(shown):
        if number:
            console.print()
        if section.verbose and section.title:
            console.print(section.title)
        for part in section.body:
            part.print(console)
        if section.pointer and not verbose:
            console.print(section.pointer)


def check_page(path: str | os.PathLike[str], expected: str) -> None:
    """Refuse a page of another name, saying what was expected, or one that cannot be written."""
    if not str(path).endswith(".html"):
        raise UsageError(f"-o {path}{expected}: name it .html")
    check_target(path)


def write_page(path: str | os.PathLike[str], title: str, text: str, sections: Iterable[Section]) -> None:
    """Write a document as one HTML file that needs no network, atomically; with drawings it takes 2 MB.

    StorageError where it cannot be written.
    """
    body, scripts = "", list[str]()
    for number, section in enumerate(sections):  # figures are numbered, so that equal contents give equal bytes
        body += f"<h2>{html.escape(section.title)}</h2>"
        for place, part in enumerate(section.body):
            name = f"figure-{number}-{place}"
            body += part.html(name)
            if isinstance(part, Drawing):
                scripts.append(part.script(name))
    if scripts:
        from plotly.offline import get_plotlyjs

        body += packed("\n".join([get_plotlyjs(), *scripts]))
    page = (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1><p>{html.escape(text)}</p>\n{body}</body></html>\n"
    )
    with atomic_path(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def packed(script: str) -> str:
    """A script element that unpacks a script and runs it: a third of its size."""
    compressed = zlib.compress(script.encode(), 9)
    return UNPACK.format(signs=SIGNS, packed=base64.b85encode(compressed, pad=True).decode(), size=len(compressed))
