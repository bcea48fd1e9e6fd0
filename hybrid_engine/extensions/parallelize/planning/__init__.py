"""Which op is split how: plans, and what makes them."""
