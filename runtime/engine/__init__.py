"""Trips of tokens to their experts and on: exchanges, chunks, the layer, and what they take (all dispatch models)."""
