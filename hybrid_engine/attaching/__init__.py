"""`attach`: containers for the `generate()` of a model that somebody else trains."""

from hybrid_engine.attaching.attached import Attached, attach

__all__ = ["Attached", "attach"]
