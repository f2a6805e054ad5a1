"""A run of `permute` in a process of its own: ended in the middle of a file, or undone and its memory told."""

import sys
import time
from pathlib import Path

from moeplan.runtime.checkpoints import permute, undo
from moeplan.runtime.plan import load


def main(plan: str, source: str, permuted: str, restored: str = "", stop_after: str = "inf") -> None:
    """Permute, undo where it is said whereto, and print the most mebibytes that were resident.

    Once `stop_after` bytes are written it prints "there" instead, and sleeps.
    """

    def tell(done: int, total: int) -> None:
        if done >= float(stop_after):
            print("there", flush=True)
            time.sleep(60)

    permute(load(Path(plan)), source, permuted, on_progress=tell)
    if restored:
        undo(permuted, restored)
    status = Path("/proc/self/status").read_text().splitlines()  # rusage would count the parent's before exec, too
    print(next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM")))


if __name__ == "__main__":
    main(*sys.argv[1:])
