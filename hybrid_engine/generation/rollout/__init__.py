"""A rollout from `generate()`'s arguments to what it returns."""
