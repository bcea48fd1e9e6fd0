"""`deepspeed.compression.helper`."""

from hybrid_engine.extensions.deepspeed.utils import *
