"""From files and examples to tensors: prompts, preferences, sequences."""
