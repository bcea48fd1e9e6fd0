"""The three levels at which people customise generation: backend, text-generation strategy, wrapped model."""
