"""DeepSpeed's names: thin modules over the engine, importable below `hybrid_engine` and, on request, `deepspeed`."""
