"""Trips of tokens to their experts and on: exchanges, chunks, the layer and its timings (all dispatch models)."""
