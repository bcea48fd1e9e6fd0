"""The model while it generates: containers on gathered weights, stages, exact mode, scores of existing tokens."""
