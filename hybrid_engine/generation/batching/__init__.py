"""Continuous batching: KV blocks, the scheduler, rollout plans, decode steps and the strategy that takes turns."""
