"""Checkpoints of parallel modules, which go between any two plans and to and from the module itself."""
