"""Samples that move to the ranks of their experts while the loop runs (NetMoE)."""
