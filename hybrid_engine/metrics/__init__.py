"""Records of a training run: times, operations, curves and memory."""
