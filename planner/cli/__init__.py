"""The command line: one command a module, each a thin wrapper of a documented call."""

import os
import sys

from ...errors import MoeplanError
from .lazy import LazyGroup

__all__ = ["COMMANDS", "group", "main"]

COMMANDS = {
    "profile": "Measure this machine's GEMM and all-to-all, or describe a cluster.",
    "trace": "Record, import, inspect and count routing traces.",
    "solve": "Compute a plan from a trace.",
    "show": "Print a plan: tables and a picture of the placement.",
    "certify": "Recompute everything a plan claims, by independent code.",
    "apply": "Certify a plan and make it this directory's active plan.",
    "demo": "Run the whole chain on the embedded model and measure it.",
}

group = LazyGroup(
    "moeplan",
    COMMANDS,
    help="Plan Mixture-of-Experts expert parallelism: measure, record, solve, apply.\n\n"
    "In an empty directory, one after another: moeplan profile; moeplan solve --strategy exflow;"
    " moeplan apply plan.json.",
)


def main() -> None:
    """Run the command line; an expected failure is one line on stderr and its exit code."""
    try:
        group.main(prog_name="moeplan")
    except MoeplanError as error:
        print(f"moeplan: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
