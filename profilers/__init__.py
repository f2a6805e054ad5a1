"""Measuring the hardware: cases, the harness, fits, the Profile and the Cluster."""
