"""The modules that run by a plan."""
