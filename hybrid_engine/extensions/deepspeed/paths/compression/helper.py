"""`deepspeed.compression.helper`."""

from hybrid_engine.extensions.deepspeed.compression_helper import *
