"""Write golden records anew: `python -m tests.golden.write [CASE...] [--section SECTION...]`; all without."""

import argparse
import tempfile
from itertools import islice
from pathlib import Path

import tests.conftest  # noqa: F401  where numba keeps what it compiles, before it is imported
from tests.golden.cases import COMPARES, SOLVES
from tests.golden.record import SECTIONS, differences, load, save
from tests.golden.workshop import Workshop

SHOWN = 12


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.write", description=__doc__)
    parser.add_argument("case", nargs="*", choices=[[], *SOLVES, *COMPARES], metavar="CASE")
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=SECTIONS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Workshop.opened(Path(folder)) as workshop:
        for case in asked.case or [*SOLVES, *COMPARES]:
            golden, record = load(case), workshop.record(case)
            changed = [line for name in asked.section for line in differences(golden.get(name), record.get(name), name)]
            if changed:
                save(case, record, asked.section)
                print(f"{case}: {len(changed)} values", *islice(changed, SHOWN), sep="\n  ")


if __name__ == "__main__":
    main()
