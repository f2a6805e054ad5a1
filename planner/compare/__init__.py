"""Comparing plans side by side on any trace of their model."""
