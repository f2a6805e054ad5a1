"""`python -m moeplan.planner.cli` is `moeplan`."""

from . import main

main()
