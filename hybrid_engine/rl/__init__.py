"""The maths of reinforcement learning from feedback, as pure functions of tensors and numbers.

Conventions that every file here keeps: `[B, T]` tensors hold one row per sampled response and one column
per response token, a mask is bool and True on response tokens (the end-of-sequence token included), and
values under a False mask are never read. Log-probabilities are natural logarithms.
"""
