"""How much is gained by how many tokens."""
