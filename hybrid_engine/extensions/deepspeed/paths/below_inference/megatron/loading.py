"""`hybrid_engine.inference.megatron.loading` for one version; the module's path is `NEW` now."""

import warnings

from hybrid_engine.extensions.megatron.loading import *

NEW = "hybrid_engine.extensions.megatron.loading"
warnings.warn(f"{__name__} goes with the next version; import {NEW}", DeprecationWarning, stacklevel=2)
