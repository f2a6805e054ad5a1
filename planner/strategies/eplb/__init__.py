"""EPLB: busy experts are replicated, and devices loaded evenly in every step."""
