"""ZeRO on FSDP2: sharding, gathering, the optimizer shim, loss scaling and learning-rate schedules."""
