"""What is measured of a placement on a trace: tallies of copies, loads and hops, their metrics, predicted seconds."""
