"""EPLB placements: the strategy, mixtures of traces, replicas that pay, phases exchanged, the report."""
