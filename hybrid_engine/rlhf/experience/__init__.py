"""Prompts in, rollouts with rewards out, and what they look like before and after."""
