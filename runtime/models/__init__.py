"""Models as the runtime takes them: their protocols, those of transformers, and checkpoints by placement."""
