"""Scores of responses: rules, functions of the user, reward models, and their weighted sum."""
