"""Recipes: one readable file per training job, with its loop visible."""
