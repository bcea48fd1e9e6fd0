"""Training passes without full logits: log-probabilities from hidden states, and the memory of a pass."""
