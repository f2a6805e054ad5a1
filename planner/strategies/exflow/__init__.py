"""ExFlow: experts that follow each other, or serve the same tokens, live together."""
