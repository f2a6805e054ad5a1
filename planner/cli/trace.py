"""`moeplan trace`: the group of trace commands."""

from .lazy import LazyGroup

__all__ = ["COMMANDS", "group"]

COMMANDS = {
    "record": "Record the routing of a model on text.",
    "import": "Turn a foreign recording into a trace.",
    "info": "Say what is in a trace.",
    "count": "Reduce a token trace to counts.",
}

group = LazyGroup("trace", COMMANDS, prefix="trace_", help="Record, import, inspect and count routing traces.")
