"""Checkpoints of a ZeroEngine: their contents, how files are written and published, and the checks before a load.

Saving is `saving.py`, loading `loading.py`. Tensors are stored with torch.distributed.checkpoint, the rest as plain
values; nothing that a checkpoint holds is executed (`tensor_files.py`).
"""

from pkgutil import extend_path

from hybrid_engine.checkpoint.loading import load
from hybrid_engine.checkpoint.saving import choose_tag, save
from hybrid_engine.lazy import lazy_attributes

__all__ = ["choose_tag", "load", "save"]

# DeepSpeed has modules below this path too: thin files of an extension, imported when they are read.
__path__ = extend_path(__path__, "hybrid_engine.below_checkpoint")
__getattr__ = lazy_attributes(__name__)
