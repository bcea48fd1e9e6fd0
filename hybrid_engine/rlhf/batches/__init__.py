"""Rows as the trainer computes them: packed sequences, spans, micro-batches."""
