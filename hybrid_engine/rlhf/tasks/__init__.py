"""Tasks for the small models of the recipes, with their rewards, and the data of supervised training."""
