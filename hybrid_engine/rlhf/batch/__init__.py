"""Answering prompts from files, without training."""
