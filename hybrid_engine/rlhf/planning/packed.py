"""Weights that a model's config says are quantised, as bitsandbytes and torchao keep them: their bytes, and where."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from hybrid_engine.rlhf.runs.adapters import IS_PACKED

BLOCK, OUTER_BLOCK = 64, 256
"""Values with one scale, and scales with one scale of their own (bitsandbytes 0.50, `functional.quantize_4bit`)."""
CODE_4_BITS, CODE_8_BITS = 16 * 4, 256 * 4
"""Bytes of the values that codes stand for."""


def check_one_process(trained: Iterable[Any], num_processes: int) -> None:
    """ValueError for several processes where one of the configs of the models that are `trained` is quantised."""
    if num_processes > 1 and any(getattr(config, "quantization_config", None) is not None for config in trained):
        raise ValueError(
            f"--processes={num_processes}: --model {IS_PACKED}; plan and train with --processes 1, or give the model "
            "in full precision"
        )


def packed_bytes(quantisation: dict[str, Any], linear: nn.Linear) -> int:
    """The bytes of the packed weight of `linear` with its scales.

    Args:
        quantisation: the `quantization_config` of the model's config.
        linear: as it was before it was quantised.

    Raises:
        ValueError: of this kind of quantisation nothing is known.
    """
    values, rows = linear.in_features * linear.out_features, linear.out_features
    kind = quantisation.get("quant_method")
    if kind == "bitsandbytes" and quantisation.get("load_in_4bit"):
        blocks = -(-values // BLOCK)
        if not quantisation.get("bnb_4bit_use_double_quant"):
            return -(-values // 2) + 4 * blocks + CODE_4_BITS
        return -(-values // 2) + blocks + 4 * -(-blocks // OUTER_BLOCK) + CODE_4_BITS + CODE_8_BITS
    if kind == "bitsandbytes":
        return values + 4 * rows
    if "Int8WeightOnly" in str(quantisation.get("quant_type")):
        return values + (4 + 1) * rows  # a scale and a zero point
    raise ValueError(
        f"--model is quantised by {kind!r} ({quantisation.get('quant_type')}), of which plan knows no sizes; it knows "
        "bitsandbytes and torchao's Int8WeightOnlyConfig"
    )
