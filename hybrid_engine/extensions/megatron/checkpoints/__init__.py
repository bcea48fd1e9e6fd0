"""Megatron-LM's GPT checkpoints: read, and a model that runs them."""
