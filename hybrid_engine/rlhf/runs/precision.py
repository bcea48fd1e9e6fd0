"""The precision in which models compute: `--dtype` and `--tf32`, with one meaning in all commands.

Trained weights have fp32 masters; losses, log-probabilities, advantages and the optimizer's state are fp32 too.
"""

from typing import Any

import torch

from hybrid_engine.rlhf.options.shared import AUTO, DtypeOptions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_LOSS_SCALE_POWER = 12
"""For fp16: DeepSpeed's 16 overflows the gradients of a language model, whose first steps would be skipped."""


def choose_dtype(dtype: str, device_type: str | None = None) -> str:
    """`dtype` with auto resolved, for devices of a type; None: those of this machine."""
    if dtype != AUTO:
        return dtype
    is_gpu = torch.cuda.is_available() if device_type is None else device_type == "cuda"
    return "bf16" if is_gpu else "fp32"


def torch_dtype(dtype: str, device_type: str | None = None) -> torch.dtype:
    """`choose_dtype` as a torch dtype."""
    return DTYPES[choose_dtype(dtype, device_type)]


def gradient_figures(engine: Any, prefix: str = "") -> dict[str, Any]:
    """The gradient norm of an engine's last optimizer step, with `prefix` before its name, and fp16's figures."""
    return {f"{prefix}grad_norm": engine.get_global_grad_norm(), **scaling_figures(engine, prefix)}


def scaling_figures(engine: Any, prefix: str = "") -> dict[str, Any]:
    """In fp16 the next loss scale and the number of steps skipped so far, whose gradients were not finite; else empty.

    The norm of such a step's gradients is not finite either.
    """
    if not engine.config.fp16.enabled:
        return {}
    return {f"{prefix}loss_scale": engine.optimizer.cur_scale, f"{prefix}skipped_steps": engine.skipped_steps}


def apply_tf32(options: DtypeOptions) -> None:
    """Sets whether fp32 products on a GPU may use TF32 in this process.

    Raises:
        ValueError: TF32 is requested, and there is no GPU.
    """
    if options.tf32 and not torch.cuda.is_available():
        raise ValueError("--tf32 rounds the factors of a GPU's products, and there is no GPU here; leave it out")
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    torch.backends.cudnn.allow_tf32 = options.tf32


def dtype_blocks(dtype: str) -> dict[str, Any]:
    """The blocks of an engine's config for `dtype`."""
    found = choose_dtype(dtype)
    blocks = {"bf16": {"enabled": True}, "fp16": {"enabled": True, "initial_scale_power": FIRST_LOSS_SCALE_POWER}}
    return {found: blocks[found]} if found in blocks else {}
