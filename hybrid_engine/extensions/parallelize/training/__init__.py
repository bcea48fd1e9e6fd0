"""`build_optimizer`: any optimizer, gradients summed over units, ZeRO over them."""
