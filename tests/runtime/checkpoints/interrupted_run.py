"""A run of `permute` in a process of its own, so slow that a test can end it in the middle of a file it names."""

import sys
import time
from pathlib import Path

from moeplan.runtime.checkpoints import permute
from moeplan.runtime.plan import load


def main(plan: str, source: str, destination: str, stop_after: str) -> None:
    """Permute, but say "there" and sleep once so many bytes are written."""

    def tell(done: int, total: int) -> None:
        if done >= int(stop_after):
            print("there", flush=True)
            time.sleep(60)

    permute(load(Path(plan)), source, destination, on_progress=tell)


if __name__ == "__main__":
    main(*sys.argv[1:])
