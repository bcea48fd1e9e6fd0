"""The model while it generates: containers on gathered weights, stages, exact mode, scores of given tokens."""
