"""`deepspeed.runtime.zero.partition_parameters`: sharding while a model is built, a parameter's place and whole."""

from collections.abc import Callable
from typing import Any

import torch

from hybrid_engine.zero.gathered_parameters import GatheredParameters, ZeroParamStatus
from hybrid_engine.zero.init import Init

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus"]

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """`fn`, as it is: `Init` changes none of torch's constructors. transformers replaces this name while it loads."""
    return fn
