"""The processes of a run: their ranks, how they meet and are interrupted, and the data that each gets."""
