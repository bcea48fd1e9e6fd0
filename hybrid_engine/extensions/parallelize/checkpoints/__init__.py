"""Checkpoints of parallel modules, which can be loaded under any plan and into the original module."""
