"""What is written down of a training run: times, operations and curves."""
