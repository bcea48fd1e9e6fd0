"""`deepspeed.launcher.runner`."""

from hybrid_engine.extensions.deepspeed.launcher_names import *
