"""The sum of the outputs of a token's experts, with a shared expert and the residual if the block has them.

    y[n] = sum_k expert_outputs[n, k]                    in fp32, slot after slot, rounded once
    y    = y + sigmoid(shared_logit) * shared            a shared expert (Qwen2-MoE)
    y    = y + residual

One program reads all slots of its piece of a row, so the order of the sum is fixed: no atomics. Moves
(top_k + 1) N E elements and as many operations. Rounds to the dtype at the same points as transformers' modules: after
the sum, the sigmoid, the product and every addition.
"""

import torch

from hybrid_engine.ops.dispatch import (
    Launch,
    check_tensor,
    kernel_or_reference,
    next_power_of_2,
    prepared,
    tl,
    triton,
    use_triton,
)

# Elements of a row that one program sums.
MAX_BLOCK = 1024


class ExpertSumOp:
    """Callable `(expert_outputs [N, top_k, E], shared=None, shared_logit=None, residual=None) -> [N, E]`."""

    def __call__(
        self,
        expert_outputs: torch.Tensor,
        dtype: torch.dtype,
        shared: torch.Tensor | None = None,
        shared_logit: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`expert_outputs [N, top_k, E]` -> `[N, E]` in `dtype`.

        Args:
            dtype: dtype of the result; `expert_outputs` may be fp32, if the routing weights are.
            shared: `[N, E]` output of the shared expert.
            shared_logit: `[N, 1]`, whose sigmoid is the weight of `shared`; None: weight 1.
            residual: `[N, E]`, added last.
        """
        num_tokens, _, width = expert_outputs.shape
        if shared_logit is not None and shared is None:
            raise ValueError("shared_logit weighs a shared expert; pass its output as shared")
        shapes = {"shared": (shared, width), "shared_logit": (shared_logit, 1), "residual": (residual, width)}
        for name, (tensor, columns) in shapes.items():
            if tensor is not None:
                check_tensor(name, tensor, like=expert_outputs, dtype=dtype, shape=(num_tokens, columns))
        if use_triton(expert_outputs):
            arguments = (expert_outputs, dtype, shared, shared_logit, residual)
            return kernel_or_reference(self._launch, self.reference, *arguments)
        return self.reference(expert_outputs, dtype, shared, shared_logit, residual)

    def reference(
        self,
        expert_outputs: torch.Tensor,
        dtype: torch.dtype,
        shared: torch.Tensor | None = None,
        shared_logit: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The reference: the function of the kernel in plain torch."""
        first, *others = expert_outputs.unbind(1)
        output = first.double() if first.dtype == torch.float64 else first.float()
        for other in others:
            output = output + other
        output = output.to(dtype)
        if shared is not None:
            output = output + (shared if shared_logit is None else torch.sigmoid(shared_logit) * shared)
        return output if residual is None else output + residual

    def _launch(
        self,
        expert_outputs: torch.Tensor,
        dtype: torch.dtype,
        shared: torch.Tensor | None,
        shared_logit: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        num_tokens, _, width = expert_outputs.shape
        output = torch.empty(num_tokens, width, dtype=dtype, device=expert_outputs.device)
        if not num_tokens:
            return output
        launch = prepared(_prepare, dtype, expert_outputs, shared, shared_logit, residual)
        absent = output  # a pointer the kernel does not read
        side = [absent if tensor is None else tensor for tensor in (shared, shared_logit, residual)]
        launch(
            expert_outputs, *side, output, width,
            *expert_outputs.stride(), *side[0].stride(), side[1].stride(0), *side[2].stride(),
        )  # fmt: skip
        return output


def _prepare(
    dtype: torch.dtype,  # of the output
    expert_outputs: torch.Tensor,
    shared: torch.Tensor | None,
    shared_logit: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> Launch:
    num_tokens, top_k, width = expert_outputs.shape
    block = min(MAX_BLOCK, max(next_power_of_2(width), 16))
    return Launch(
        _sum_kernel, (num_tokens, -(-width // block)), expert_outputs.device,
        TOP_K=top_k, HAS_SHARED=shared is not None, HAS_LOGIT=shared_logit is not None,
        HAS_RESIDUAL=residual is not None, BLOCK=block,
    )  # fmt: skip


@triton.jit
def _sum_kernel(
    expert_outputs, shared, shared_logit, residual, output, width,
    stride_n, stride_k, stride_e, stride_sn, stride_se, stride_ln, stride_rn, stride_re,
    TOP_K: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_LOGIT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = e < width
    dtype = output.dtype.element_ty
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        total += tl.load(expert_outputs + row * stride_n + slot * stride_k + e * stride_e, mask=mask, other=0.0)
    total = total.to(dtype).to(tl.float32)
    if HAS_SHARED:
        other = tl.load(shared + row * stride_sn + e * stride_se, mask=mask, other=0.0).to(tl.float32)
        if HAS_LOGIT:
            weight = tl.sigmoid(tl.load(shared_logit + row * stride_ln).to(tl.float32)).to(dtype).to(tl.float32)
            other = (weight * other).to(dtype).to(tl.float32)
        total = (total + other).to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + row * stride_rn + e * stride_re, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + row * width + e, total.to(dtype), mask=mask)
