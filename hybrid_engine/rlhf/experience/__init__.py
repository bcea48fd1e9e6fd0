"""Rollouts of prompts with their rewards, the models that make and learn from them, and evaluations."""
