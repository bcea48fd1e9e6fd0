"""Predicts the memory of a recipe from its options alone."""
