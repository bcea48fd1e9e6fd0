"""Answers prompts from files, without training: the model with its adapters, and a journal of answers."""
