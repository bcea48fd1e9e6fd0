"""Megatron-LM's checkpoint formats, and the three levels of its text generation."""
