"""A hybrid RLHF engine: one process and one set of weights that trains under ZeRO-3 and generates."""
