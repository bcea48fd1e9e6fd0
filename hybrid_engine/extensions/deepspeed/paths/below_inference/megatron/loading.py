"""`hybrid_engine.inference.megatron.loading` for one version; the module is `hybrid_engine.extensions.megatron.checkpoints.loading` now."""

import warnings

from hybrid_engine.extensions.megatron.checkpoints.loading import *

warnings.warn(
    "hybrid_engine.inference.megatron.loading goes with the next version; import hybrid_engine.extensions.megatron.checkpoints.loading",
    DeprecationWarning,
    stacklevel=2,
)
