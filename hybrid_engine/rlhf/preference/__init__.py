"""What the recipes that learn from preferred answers share: log-probabilities of whole answers, and pairs of them."""
