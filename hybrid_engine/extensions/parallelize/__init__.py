"""`parallelize`: runs any module on any number of processes, by a plan that is stored as a readable file."""
