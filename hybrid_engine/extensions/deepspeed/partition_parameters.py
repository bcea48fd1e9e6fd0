"""`deepspeed.runtime.zero.partition_parameters`: sharding while a model is built, a parameter's place and whole."""

from collections.abc import Callable
from typing import Any

import torch

from hybrid_engine.zero.gathered_parameters import (
    GatheredParameters,
    ZeroParamStatus,
    register_external_parameter,
    unregister_external_parameter,
)
from hybrid_engine.zero.init import Init

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "_orig_torch_arange",
    "is_zero_param",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

_orig_torch_arange = torch.arange


def is_zero_param(parameter: Any) -> bool:
    """Whether `parameter` is one of a stage 3 model."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """`fn`, as it is: `Init` changes none of torch's constructors. transformers replaces this name while it loads."""
    return fn
