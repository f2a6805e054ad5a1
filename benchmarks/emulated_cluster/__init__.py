"""An emulated cluster: nodes as network namespaces on one machine, joined by links of a given rate."""
