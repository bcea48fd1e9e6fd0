"""What a rollout is asked for: prompts and sequences, options, rules, guides, what ends an answer."""
