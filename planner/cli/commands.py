"""The commands there are."""

from .lazy import LazyGroup

__all__ = ["COMMANDS", "group"]

COMMANDS = {
    "profile": "Measure this machine, or describe a cluster.",
    "trace": "Record, import, inspect and count routing.",
    "solve": "Compute a plan from a trace.",
    "show": "Print a plan and a picture of it.",
    "compare": "Hold plans against one another on any trace.",
    "certify": "Recompute what a plan claims.",
    "apply": "Make a plan this directory's active plan, or write it for an engine.",
    "validate": "Check a file that places experts by its engine's rules.",
    "demo": "Run the whole chain on the embedded model.",
}

group = LazyGroup(
    "moeplan",
    COMMANDS,
    help="Plan Mixture-of-Experts expert parallelism: measure, record, solve, apply.\n\n"
    "In an empty directory, one after another: moeplan profile; moeplan solve --strategy exflow;"
    " moeplan apply plan.json.",
)
