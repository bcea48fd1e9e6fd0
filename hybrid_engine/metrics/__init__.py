"""Records of a training run (times, operations, curves, memory)."""
