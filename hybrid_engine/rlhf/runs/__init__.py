"""A run and its folder: options checked, engines configured, checkpoints, progress, curves."""
