"""All that a user imports from `hybrid_engine`: importing this module puts it there, DeepSpeed's module paths too."""

import sys
from importlib.metadata import version

from hybrid_engine.compat.accelerator import get_accelerator
from hybrid_engine.compat.aliases import enable_compat, register
from hybrid_engine.compat.arguments import add_config_arguments
from hybrid_engine.compat.distributed import init_distributed
from hybrid_engine.compat.utils import OnDevice, log_dist, logger
from hybrid_engine.engine import ZeroEngine
from hybrid_engine.entry import initialize
from hybrid_engine.hybrid import HybridEngine
from hybrid_engine.inference import InferenceEngine, init_inference

__version__ = version("hybrid-engine")

DeepSpeedEngine = ZeroEngine
DeepSpeedHybridEngine = HybridEngine

__all__ = [
    "DeepSpeedEngine",
    "DeepSpeedHybridEngine",
    "HybridEngine",
    "InferenceEngine",
    "OnDevice",
    "ZeroEngine",
    "add_config_arguments",
    "enable_compat",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "log_dist",
    "logger",
]

_package = sys.modules["hybrid_engine"]
vars(_package).update({name: globals()[name] for name in __all__}, __all__=__all__, __version__=__version__)
register("hybrid_engine")
