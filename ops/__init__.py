"""The ops of inference, one file each with its maths and a torch reference. They know tensors and numbers."""

from hybrid_engine.ops.batch import (
    QKV,
    Batch,
    Context,
    DecodeBatch,
    EncoderBatch,
    HeadWeights,
    KVBlocks,
    MixedBatch,
    PrefillBatch,
)
from hybrid_engine.ops.block_copy import BlockCopyOp
from hybrid_engine.ops.deepspeed_bindings import GELUGemmOp, LinearOp, ResidualAddOp
from hybrid_engine.ops.gated_activation import GatedActivationOp
from hybrid_engine.ops.log_prob import token_logprobs
from hybrid_engine.ops.mlp_gemm import MLPGemmOp
from hybrid_engine.ops.norm import NORM_OPS, LayerNormOp, NormOp, RMSNormOp
from hybrid_engine.ops.qkv_gemm import QKVGemmOp
from hybrid_engine.ops.sample import SampleOp, SamplingOptions
from hybrid_engine.ops.softmax_context import SoftmaxContextOp
from hybrid_engine.ops.vector_matmul import VectorMatMulOp

__all__ = [
    "NORM_OPS",
    "QKV",
    "Batch",
    "BlockCopyOp",
    "Context",
    "DecodeBatch",
    "EncoderBatch",
    "GELUGemmOp",
    "GatedActivationOp",
    "HeadWeights",
    "KVBlocks",
    "LayerNormOp",
    "LinearOp",
    "MLPGemmOp",
    "MixedBatch",
    "NormOp",
    "PrefillBatch",
    "QKVGemmOp",
    "RMSNormOp",
    "ResidualAddOp",
    "SampleOp",
    "SamplingOptions",
    "SoftmaxContextOp",
    "VectorMatMulOp",
    "token_logprobs",
]
