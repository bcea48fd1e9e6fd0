"""`hybrid_engine.recipes.rewards.answers` for one version; the module's path is `NEW` now."""

import warnings

from hybrid_engine.rlhf.rewards.scores import *

NEW = "hybrid_engine.rlhf.rewards.scores"
warnings.warn(f"{__name__} goes with the next version; import {NEW}", DeprecationWarning, stacklevel=2)
