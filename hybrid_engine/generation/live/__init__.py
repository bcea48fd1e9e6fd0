"""Live batches: sequences join and leave while the batch runs."""
