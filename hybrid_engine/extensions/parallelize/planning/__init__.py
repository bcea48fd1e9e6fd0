"""Plans, which say how each op is split, and the policies that make them."""
