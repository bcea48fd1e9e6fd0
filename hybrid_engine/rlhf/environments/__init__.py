"""Environments of episodes: the seam (`contract.py`), what is named (`loading.py`), tasks, and how they are played."""
