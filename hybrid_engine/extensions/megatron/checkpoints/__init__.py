"""Reads Megatron-LM's GPT checkpoints, and provides a model that runs them."""
