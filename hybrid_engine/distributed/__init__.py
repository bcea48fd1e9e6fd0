"""The processes of a run: who they are, how they meet and are interrupted, and the data that each gets."""
