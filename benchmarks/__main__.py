"""The driver: runs subjects, prints a table each, and saves results with pages and pictures.

Results go to stdout, progress to stderr. Ctrl-C prints what was found and saves nothing of that subject.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moeplan.errors import MoeplanError

from .growth import draw
from .report import index, page, page_name, show
from .result import Environment, Result, Section, load, refuse_changes, save
from .study import DEFAULT, DEFAULT_DATA, SUBJECTS, Row, Settings, Study, studies

DOCS = Path(__file__).parents[1] / "docs" / "benchmarks"
STARTED = time.perf_counter()


def main() -> int:
    """Run what was named; the exit code."""
    options = _options()
    try:
        return _run_all(options)
    except MoeplanError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def run(name: str, settings: Settings, sections: list[Section]) -> Result:
    """The result of a subject, its sections put into `sections` as they end; at Ctrl-C those that there are."""
    load_at_start = round(os.getloadavg()[0], 2)
    with contextlib.suppress(KeyboardInterrupt):
        sections.extend(_section(name, study, settings) for study in studies(name))
    return Result(
        schema_version=1,
        subject=name,
        about=SUBJECTS[name],
        form="quick" if settings.quick else "full" if settings.full else "usual",
        environment=Environment.of(load_at_start),
        sections=sections,
    )


def write(result: Result, folder: Path) -> None:
    """Save a result as JSON, its page and picture, and the index of all that are there."""
    save(result, folder / f"{result.subject}.json")
    draw(result, folder / f"{result.subject}.svg")
    (folder / page_name(result.subject)).write_text(page(result))
    there = [folder / f"{name}.json" for name in SUBJECTS]
    (folder / "README.md").write_text(index([load(path) for path in there if path.exists()]))


def _run_all(options: argparse.Namespace) -> int:
    settings = Settings(quick=options.quick, full=options.full, data=options.data)
    for name in options.names or DEFAULT:
        if options.save:
            refuse_changes()
        sections: list[Section] = []
        result = run(name, settings, sections)
        show(result)
        if len(sections) < len(studies(name)):
            _tell("interrupted")
            return 130
        if options.save:
            refuse_changes()  # made meanwhile
            write(result, DOCS)
    return 0


def _section(name: str, study: Study[Any], settings: Settings) -> Section:
    missing = study.needs and not (settings.data / study.needs).exists()
    return Section(
        title=study.title,
        quality=study.quality,
        baseline=study.baseline,
        note=study.note,
        skipped=f"no {study.needs} in ../shared/data or where MOEPLAN_DATA points" if missing else "",
        rows=[] if missing else list(_rows(name, study, settings)),
    )


def _rows(name: str, study: Study[Any], settings: Settings) -> Iterator[Row]:
    instances = list(study.instances(settings))
    for at, instance in enumerate(instances):
        _tell(f"{name}: {study.title}, {at + 1} of {len(instances)}")
        yield from study.rows(instance)


def _tell(text: str) -> None:
    print(f"{time.perf_counter() - STARTED:6.1f} s  {text}", file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    listed = "\n".join(f"  {name:18}{about}" for name, about in SUBJECTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=listed, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"by default {', '.join(DEFAULT)}")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--quick", action="store_true", help="small instances only")
    form.add_argument("--full", action="store_true", help="the largest instances too, where a subject has such")
    parser.add_argument(
        "--save",
        action="store_true",
        help="write docs/benchmarks/NAME.json, .md and .svg; refused with uncommitted changes",
    )
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="real data; ../shared/data by default")
    options = parser.parse_args()
    unknown = set(options.names) - set(SUBJECTS)
    if unknown:
        parser.error(f"no subject {', '.join(sorted(unknown))}; expected of {', '.join(SUBJECTS)}")
    return options


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & leaves it ignored
    sys.exit(main())
