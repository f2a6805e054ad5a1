"""Importers of foreign routing recordings, one a file."""
