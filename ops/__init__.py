"""The ops of inference; each file has the maths and a torch reference. They know tensors and numbers.

An op is imported when its name is first read: training needs few of them.
"""

import importlib
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_engine.ops.batch import (
        QKV,
        Batch,
        Context,
        DecodeBatch,
        EncoderBatch,
        HeadWeights,
        KVBlocks,
        MixedBatch,
        PlacedFeatures,
        PrefillBatch,
        SeenSpans,
    )
    from hybrid_engine.ops.block_copy import BlockCopyOp
    from hybrid_engine.ops.deepspeed_bindings import GELUGemmOp, LinearOp, ResidualAddOp
    from hybrid_engine.ops.gated_delta import GatedDeltaOp
    from hybrid_engine.ops.gated_norm import GatedNormOp
    from hybrid_engine.ops.latent_attention import Expansion, LatentAttentionOp, LatentHeads
    from hybrid_engine.ops.linears import GatedActivationOp, MLPGemmOp, QKVGemmOp, VectorMatMulOp
    from hybrid_engine.ops.norm import NORM_OPS, LayerNormOp, NormOp, RMSNormOp
    from hybrid_engine.ops.sample import SampleOp, SamplingOptions, token_logprobs
    from hybrid_engine.ops.short_conv import ShortConvOp
    from hybrid_engine.ops.softmax_context import SoftmaxContextOp

__all__ = [
    "NORM_OPS",
    "QKV",
    "Batch",
    "BlockCopyOp",
    "Context",
    "DecodeBatch",
    "EncoderBatch",
    "Expansion",
    "GELUGemmOp",
    "GatedActivationOp",
    "GatedDeltaOp",
    "GatedNormOp",
    "HeadWeights",
    "KVBlocks",
    "LatentAttentionOp",
    "LatentHeads",
    "LayerNormOp",
    "LinearOp",
    "MLPGemmOp",
    "MixedBatch",
    "NormOp",
    "PlacedFeatures",
    "PrefillBatch",
    "QKVGemmOp",
    "RMSNormOp",
    "ResidualAddOp",
    "SampleOp",
    "SamplingOptions",
    "SeenSpans",
    "ShortConvOp",
    "SoftmaxContextOp",
    "VectorMatMulOp",
    "token_logprobs",
]

_NAMES_OF = {
    "batch": (
        "QKV",
        "Batch",
        "Context",
        "DecodeBatch",
        "EncoderBatch",
        "HeadWeights",
        "KVBlocks",
        "MixedBatch",
        "PlacedFeatures",
        "PrefillBatch",
        "SeenSpans",
    ),
    "block_copy": ("BlockCopyOp",),
    "deepspeed_bindings": ("GELUGemmOp", "LinearOp", "ResidualAddOp"),
    "gated_delta": ("GatedDeltaOp",),
    "gated_norm": ("GatedNormOp",),
    "latent_attention": ("Expansion", "LatentAttentionOp", "LatentHeads"),
    "linears": ("GatedActivationOp", "MLPGemmOp", "QKVGemmOp", "VectorMatMulOp"),
    "norm": ("NORM_OPS", "LayerNormOp", "NormOp", "RMSNormOp"),
    "sample": ("SampleOp", "SamplingOptions", "token_logprobs"),
    "short_conv": ("ShortConvOp",),
    "softmax_context": ("SoftmaxContextOp",),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}

# DeepSpeed has modules below this path too, such as `ops.adam.cpu_adam`: thin files of an extension.
__path__ = extend_path(__path__, "hybrid_engine.below_ops")


def __getattr__(name: str) -> Any:
    """A name of `__all__`, or a module below this package, which is imported now."""
    module = f"{__name__}.{_MODULE_OF.get(name, name)}"
    try:
        found = None if name.startswith("__") else importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        found = None
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _MODULE_OF:
        return found
    return globals().setdefault(name, getattr(found, name))
