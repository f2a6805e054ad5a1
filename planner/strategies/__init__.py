"""The strategies, one folder each: how a plan is solved, against what it is judged, how it is rechecked and shown."""
