"""Packages that import the core and that the core never imports: DeepSpeed's names, `parallelize`, Megatron."""
