"""Turns plans into code that computes on parts of tensors."""
