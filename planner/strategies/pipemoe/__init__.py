"""Layers in chunks: where they are cut, the seconds they take, degrees chosen by them, timelines and the report."""
