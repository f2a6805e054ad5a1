"""The command line: one command a module, each a thin wrapper of a documented call."""
