"""Probes: measure whether containers compute the module's function, and cache the verdicts."""
