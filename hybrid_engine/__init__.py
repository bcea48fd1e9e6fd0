"""A hybrid RLHF engine: one process and one set of weights that trains under ZeRO-3 and generates."""

from hybrid_engine.engine import ZeroEngine
from hybrid_engine.entry import initialize
from hybrid_engine.hybrid import HybridEngine
from hybrid_engine.zero.processes import init_distributed

__all__ = ["HybridEngine", "ZeroEngine", "init_distributed", "initialize"]
