"""What memory there is, what training will take, and the KV workspace."""
