"""Generation by pipeline stages: processes that hold some of a model's layers each."""
