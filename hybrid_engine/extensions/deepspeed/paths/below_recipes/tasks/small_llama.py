"""`hybrid_engine.recipes.tasks.small_llama` for one version; the module's path is `NEW` now."""

import warnings

from hybrid_engine.rlhf.tasks.corpus import *

NEW = "hybrid_engine.rlhf.tasks.corpus"
warnings.warn(f"{__name__} goes with the next version; import {NEW}", DeprecationWarning, stacklevel=2)
