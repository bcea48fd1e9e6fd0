"""The graph of a module's ops, traced and divided into stages, how each op can be split, and `ComputeConfig`."""
