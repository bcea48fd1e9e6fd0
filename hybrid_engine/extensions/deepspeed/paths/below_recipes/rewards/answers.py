"""`hybrid_engine.recipes.rewards.answers` for one version; the module is `hybrid_engine.rlhf.rewards.answers` now."""

import warnings

from hybrid_engine.rlhf.rewards.answers import *

warnings.warn(
    "hybrid_engine.recipes.rewards.answers goes with the next version; import hybrid_engine.rlhf.rewards.answers",
    DeprecationWarning,
    stacklevel=2,
)
