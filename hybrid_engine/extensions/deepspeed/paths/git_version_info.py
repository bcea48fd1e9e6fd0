"""`deepspeed.git_version_info`."""

from hybrid_engine.extensions.deepspeed.version_names import *
