"""Compares and shows finished runs: `hybrid-engine diff` and `hybrid-engine report`. Does not need torch."""
