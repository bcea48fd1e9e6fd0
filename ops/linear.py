"""`y = x W + b (+ residual)`: the product of `vector_matmul` under the name of DeepSpeed's binding with a bias."""

from hybrid_engine.ops.vector_matmul import VectorMatMulOp


class LinearOp(VectorMatMulOp):
    """Callable `(input [N, in], weight [in, out], bias [out] or None, residual [N, out] or None) -> [N, out]`."""
