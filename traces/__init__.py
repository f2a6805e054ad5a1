"""Routing traces: schema, writer, reader, recorder, importers, counts and splits."""
