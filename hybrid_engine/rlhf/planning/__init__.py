"""What memory a recipe will take, from its options alone."""
