"""`hybrid_engine.recipes.tasks.small_llama` for one version; the module's path is `NEW` now."""

import warnings

from hybrid_engine.rlhf.tasks.small_llama import *

NEW = "hybrid_engine.rlhf.tasks.small_llama"
warnings.warn(f"{__name__} goes with the next version; import {NEW}", DeprecationWarning, stacklevel=2)
