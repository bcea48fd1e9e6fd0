"""`build_optimizer`: any optimizer for parallel modules, with gradients summed over units and ZeRO over units."""
