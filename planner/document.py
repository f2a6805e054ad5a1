"""A document: sections of text, tables and drawings, shown on a console or written as a page."""

import html
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..files import atomic_path, check_target
from .picture import DARK, LIGHT, PICTURE_STYLE, SMALL, Picture, colour_rules

if TYPE_CHECKING:
    from rich.console import Console

# The browser itself is told to fetch nothing, and to run nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
INK, SOFT, GRID, PAPER, *_ = LIGHT
NIGHT = "@media screen and (prefers-color-scheme: dark)"
STYLE = f"""
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 1.5em auto; padding: 0 1em;
  color: {INK}; background: {PAPER} }}
h1 {{ font-size: 1.4em; margin: 0 }} h2 {{ font-size: 1.15em; margin: 2em 0 .3em }}
p {{ margin: .3em 0; white-space: pre-wrap; overflow-wrap: anywhere }}
p.big {{ font-size: 2.6em; font-weight: 700; line-height: 1.2; margin: .4em 0 .1em }}
p.mono {{ font: 12px/1.5 ui-monospace, monospace }}
.wide {{ overflow-x: auto; margin: .6em 0 }} .paper {{ display: none }} table {{ border-collapse: collapse }}
td, th {{ padding: .15em .9em .15em 0; text-align: right; vertical-align: top; font-weight: normal;
  border-bottom: 1px solid {GRID} }}
th {{ color: {SOFT} }} td:first-child, th:first-child, .words td, .words th {{ text-align: left }}
@media screen {{ td {{ white-space: nowrap }} }}
@media screen and (max-width: 600px) {{ td:first-child {{ white-space: normal; overflow-wrap: anywhere;
  min-width: 6em }} }}
.words td {{ white-space: normal; overflow-wrap: anywhere }} .words td:first-child {{ overflow-wrap: normal }}
details {{ margin: 1em 0 }} summary {{ cursor: pointer; font-weight: 600 }}
.pictures {{ display: grid; gap: 1.4em 2em; margin: .8em 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)) }}
.small {{ gap: .8em; grid-template-columns: repeat(auto-fill, minmax(140px, 1fr)) }}
figure {{ margin: 0; max-width: 560px }} .small figure {{ max-width: 190px }}
svg {{ display: block; width: 100%; height: auto }}
@media print {{ body {{ font-size: 10.5pt; margin: 0; padding: 0; max-width: none }}
  figure, tr {{ break-inside: avoid }} h2, h2 + p {{ break-after: avoid }}
  .pictures {{ display: block }} .small figure {{ width: 24% }}
  figure {{ display: inline-block; vertical-align: top; width: 48%; margin: 0 1% .8em 0 }}
  .wide {{ overflow: visible }} .screen {{ display: none }} .paper {{ display: block }}
  table {{ font-size: 8pt }} td, th {{ padding-right: .6em }}
  @page {{ size: A4; margin: 14mm }} }}
{PICTURE_STYLE}
{colour_rules(LIGHT)}
{NIGHT} {{ body {{ color: {DARK[0]}; background: {DARK[3]} }}
  td, th {{ border-color: {DARK[2]} }} th {{ color: {DARK[1]} }}
  image {{ filter: invert(1) hue-rotate(180deg) }} {colour_rules(DARK)} }}
"""
GAP = 2  # signs between two columns
SHEET = 110  # signs of a table across a sheet


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

    def html(self) -> str:
        """Paragraphs of a page; what is set in columns in signs of one width."""
        kind = " class='mono'" if any("  " in line for line in self.lines) else ""
        return "".join(f"<p{kind}>{html.escape(line)}</p>" for line in self.lines if line) + "\n"


@dataclass(frozen=True, slots=True)
class Headline:
    """A few words in large type; a console leaves them out."""

    words: str

    def print(self, console: "Console") -> None:
        """Print nothing."""

    def html(self) -> str:
        """Paragraph of a page."""
        return f'<p class="big">{html.escape(self.words)}</p>\n'


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
    words: bool = False  #: Whether its cells are words, not figures

    @classmethod
    def of_words(cls, rows: Mapping[str, str]) -> "Table":
        """A table of words by name."""
        return cls([Column("", [*rows]), Column("", [*rows.values()])], words=True)

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

    def html(self) -> str:
        """Table of a page; one of words is set to the left, one of more figures than a sheet holds printed in parts."""
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        parts = [] if self.words else replace(self, whole=True).fitting(SHEET)
        if len(parts) < 2:
            return self._rows_html("wide words" if self.words else "wide") + f"{note}\n"
        printed = "".join(part._rows_html("wide paper") for part in parts)
        return self._rows_html("wide screen") + printed + f"{note}\n"

    def _rows_html(self, kind: str) -> str:
        head = "".join(f"<th>{html.escape(column.header)}</th>" for column in self.columns)
        rows = zip(*(column.cells for column in self.columns), strict=True)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        first = f"<tr>{head}</tr>" if any(column.header for column in self.columns) else ""
        return f'<div class="{kind}"><table>{first}{body}</table></div>'


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a document."""

    title: str  #: Its heading on a page, and on a console where it is of the details
    body: Sequence[Text | Headline | Table | Picture]
    verbose: bool = False  #: Whether a console shows it only when all details are asked for
    pointer: str = ""  #: The last line on a console that leaves details out


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


def check_page(path: str | os.PathLike[str], expected: str, *, kinds: Sequence[str] = (".html",)) -> None:
    """Refuse a page of another name, saying what was expected, or one that cannot be written."""
    if not str(path).endswith((*kinds,)):
        raise UsageError(f"-o {path}{expected}: name it {' or '.join(kinds)}")
    check_target(path)


def write_page(path: str | os.PathLike[str], title: str, text: str, sections: Iterable[Section]) -> None:
    """Write a document as one HTML file that needs no network and no script, atomically; details are folded.

    StorageError where it cannot be written.
    """
    body = "".join(map(_html, sections))
    page = (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1><p>{html.escape(text)}</p>\n{body}</body></html>\n"
    )
    with atomic_path(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _html(section: Section) -> str:
    """A section of a page, its pictures side by side."""
    body, title = "", html.escape(section.title)
    for kind, parts in groupby(section.body, lambda part: isinstance(part, Picture) and ("pictures", part.width)):
        shown = "".join(part.html() for part in parts)
        body += (
            f'<div class="{"pictures small" if kind[1] == SMALL else "pictures"}">{shown}</div>\n' if kind else shown
        )
    if not body:
        return ""
    if section.verbose:
        return f"<details><summary>{title}</summary>{body}</details>\n"
    return f"<h2>{title}</h2>{body}" if title else body
