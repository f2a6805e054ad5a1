"""Write golden records, and without a case screens, anew.

`python -m tests.golden.write [CASE...] [--section SECTION...]`; all without.
"""

import argparse
import tempfile
from itertools import islice
from pathlib import Path

import tests.conftest  # noqa: F401  says where compiled code is kept, before there is any
from tests.golden.cases import COMPARES, SOLVES
from tests.golden.record import SECTIONS, SHOWN, differences, load, save
from tests.golden.screens import FOLDER, SCREENS, screen
from tests.golden.workshop import Workshop


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.write", description=__doc__)
    parser.add_argument("case", nargs="*", metavar="CASE", choices=[[], *SOLVES, *COMPARES])
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=SECTIONS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Workshop.opened(Path(folder)) as workshop:
        for case in asked.case or [*SOLVES, *COMPARES]:
            golden, record = load(case), workshop.record(case)
            changed = [line for name in asked.section for line in differences(golden.get(name), record.get(name), name)]
            if changed:
                save(case, record, asked.section)
                print(f"{case}: {len(changed)} values", *islice(changed, SHOWN), sep="\n  ")
        for name in SCREENS if not asked.case else ():
            (FOLDER / f"{name}.txt").write_text(screen(workshop, name))


if __name__ == "__main__":
    main()
