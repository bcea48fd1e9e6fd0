"""Records of a training run (times, operations, curves, memory), and checks of the machine and the installation."""
