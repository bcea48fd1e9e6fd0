"""Recipes: one readable file per training job, its loop visible."""
