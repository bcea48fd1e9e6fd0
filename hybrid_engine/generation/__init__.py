"""Generation: a backend runs a strategy over a wrapped model; the scheduler says who runs, the workspace holds KV."""
