"""The three levels at which users can customize generation: backend, text-generation strategy, wrapped model."""
