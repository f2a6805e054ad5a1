"""Make the presets anew from aiconfigurator's tables: `python -m benchmarks.make_presets [TABLES]`."""

import sys
from pathlib import Path

from moeplan.files import atomic_path
from moeplan.profilers.presets.preset import PRESETS, file_name, packed, preset_of
from moeplan.profilers.tables import read_tables

ROOT = Path(__file__).parents[1]
TABLES = ROOT.parent / "shared" / "data" / "gpu-measurements"


def main(tables: Path) -> None:
    """Write every preset's file into the clone."""
    for name, preset in PRESETS.items():
        path = ROOT / "profilers" / "presets" / file_name(name)
        with atomic_path(path) as temporary:
            temporary.write_bytes(packed(preset_of(read_tables(tables, name), preset)))
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TABLES)
