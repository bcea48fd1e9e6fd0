"""`parallelize`: any module on any number of processes, by a plan that can be read."""
