"""Steps of the parameters: masters, the optimizer shim, accumulation, loss scaling and learning-rate schedules."""
