"""The modules that run by a plan, from graphs, from hooks, or in stages, and what they are made of."""
