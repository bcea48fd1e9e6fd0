"""The engines: ZeroEngine trains, HybridEngine trains and generates, attach() generates in a loop of somebody else."""
