"""Solvers: pure functions of arrays to frozen results."""
