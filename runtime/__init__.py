"""The plan and its execution in a training or inference loop."""
