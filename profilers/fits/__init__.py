"""Fitted models of seconds over sizes."""
