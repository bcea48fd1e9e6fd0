"""The DeepSpeed-format config of a trained role, from the few numbers that a user of a recipe may choose."""

from typing import Any

from hybrid_engine.rlhf.options.shared import largest_divisor
from hybrid_engine.rlhf.runs.precision import dtype_blocks

ADAM_EPS = 1e-5
"""PyTorch's 1e-8 takes aggressive first steps for small gradients (Huang et al., "N implementation details")."""


def build_engine_config(
    *,
    batch_size: int,
    micro_batch_size: int,
    learning_rate: float,
    zero_stage: int,
    dtype: str,
    weight_decay: float = 0.0,
    max_out_tokens: int | None = None,
    exact: bool = False,
    max_running: int = 0,
) -> dict[str, Any]:
    """A config for `hybrid_engine.initialize`: AdamW, gradients clipped to norm 1.

    Args:
        batch_size: samples of an optimizer step over all processes.
        micro_batch_size: samples of a forward pass on one process.
        learning_rate: the peak of the schedule (`schedule.py`).
        zero_stage: 0 to 3.
        dtype: in which the role computes, a value of `--dtype`.
        weight_decay: decoupled.
        max_out_tokens: prompt and response tokens of the longest sequence that the role generates; None for a role that
            does not generate.
        exact: whether a role that generates also trains in exact mode (docs/exact.md).
        max_running: sequences that such a role decodes at once; 0 uses the engine's default.
    """
    config: dict[str, Any] = dtype_blocks(dtype) | {
        "train_batch_size": batch_size,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "zero_optimization": {"stage": zero_stage},
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": learning_rate, "betas": [0.9, 0.95], "eps": ADAM_EPS, "weight_decay": weight_decay},
        },
    }
    if max_out_tokens is not None:
        # The recipe logs the times itself, in the line of their step.
        block = {"enabled": True, "max_out_tokens": max_out_tokens, "print_latency": False, "exact": exact}
        config["hybrid_engine"] = block | {"max_running": max_running}
    return config


def largest_micro_batch(per_process: int, limit: int) -> int:
    """Samples of a forward pass, at most `limit`: every optimizer step must have the same number of equal passes.

    Args:
        per_process: samples of an optimizer step on one process.
        limit: the most that fits into memory.
    """
    return largest_divisor(per_process, limit)
