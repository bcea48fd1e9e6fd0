"""From files and examples to token ids: rows, prompts, preferences, held-out parts."""
