"""A permutation, and its undoing, in a process of its own, which says the most memory that was resident."""

import sys
from pathlib import Path

from moeplan.runtime.checkpoints import permute, undo
from moeplan.runtime.plan import load


def main(plan: str, source: str, permuted: str, restored: str = "") -> None:
    """Permute, undo where it is said whereto, and print the mebibytes."""
    permute(load(Path(plan)), source, permuted)
    if restored:
        undo(permuted, restored)
    status = Path("/proc/self/status").read_text().splitlines()  # rusage would count the parent's before exec, too
    print(next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM")))


if __name__ == "__main__":
    main(*sys.argv[1:])
