"""PipeMoE: exchanges and experts overlap, layer by layer in the chunks that take the fewest seconds."""
