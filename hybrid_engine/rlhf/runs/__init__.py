"""A run and its folder: checks of options, engine configs, checkpoints, progress, figures."""
