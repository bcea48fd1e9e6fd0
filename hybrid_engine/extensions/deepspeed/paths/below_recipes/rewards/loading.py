"""`hybrid_engine.recipes.rewards.loading` for one version; the module is `hybrid_engine.rlhf.rewards.loading` now."""

import warnings

from hybrid_engine.rlhf.rewards.loading import *

warnings.warn(
    "hybrid_engine.recipes.rewards.loading goes with the next version; import hybrid_engine.rlhf.rewards.loading",
    DeprecationWarning,
    stacklevel=2,
)
