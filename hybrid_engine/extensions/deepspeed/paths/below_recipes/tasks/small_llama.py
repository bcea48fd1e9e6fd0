"""`hybrid_engine.recipes.tasks.small_llama` for one version; the module is `hybrid_engine.rlhf.tasks.small_llama` now."""

import warnings

from hybrid_engine.rlhf.tasks.small_llama import *

warnings.warn(
    "hybrid_engine.recipes.tasks.small_llama goes with the next version; import hybrid_engine.rlhf.tasks.small_llama",
    DeprecationWarning,
    stacklevel=2,
)
