"""Rollouts, from the arguments of `generate()` to its output."""
