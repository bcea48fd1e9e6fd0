"""Checkpoints of a ZeroEngine: what they hold, how they reach their place, and what is checked before one is loaded.

Saving is `saving.py`, loading `loading.py`; tensors are stored with torch.distributed.checkpoint (`tensor_files.py`),
the rest as plain values. Nothing that a checkpoint holds is executed (`tensor_files.py`).
"""

from hybrid_engine.checkpoint.loading import load
from hybrid_engine.checkpoint.saving import choose_tag, save

__all__ = ["choose_tag", "load", "save"]
