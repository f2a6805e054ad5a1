"""Recording Hugging Face models from a local directory; nothing is ever downloaded."""
