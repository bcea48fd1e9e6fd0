"""Checkpoints of a ZeroEngine: what they hold, how they reach their place, and what is checked before one is loaded.

Saving is `saving.py`, loading `loading.py`; tensors are stored with torch.distributed.checkpoint (`tensor_files.py`),
the rest as plain values. Nothing that a checkpoint holds is executed (`tensor_files.py`).
"""

from pkgutil import extend_path

from hybrid_engine.checkpoint.loading import load
from hybrid_engine.checkpoint.saving import choose_tag, save
from hybrid_engine.lazy import lazy_attributes

__all__ = ["choose_tag", "load", "save"]

# DeepSpeed has modules below this path too: thin files of an extension, imported when they are read.
__path__ = extend_path(__path__, "hybrid_engine.below_checkpoint")
__getattr__ = lazy_attributes(__name__)
