"""The parts of a generation request: prompts and sequences, options, rules, guides and end tokens."""
