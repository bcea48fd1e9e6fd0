"""What `parallelize` and its company are given, each value by its rule."""
