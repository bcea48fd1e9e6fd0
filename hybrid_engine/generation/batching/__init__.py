"""Who runs next: prompts and sequences, blocks, the plan of a rollout, the strategy that takes turns."""
