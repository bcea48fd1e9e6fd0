"""Code of the recipes that learn from preferences: log-probabilities of whole answers, pairs, options, first actor."""
