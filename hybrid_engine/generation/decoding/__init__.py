"""One decode step for all rows, recorded and kept."""
