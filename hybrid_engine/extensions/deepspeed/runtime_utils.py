"""`deepspeed.runtime.utils`: the helpers that scripts import from there."""

import gc
import os
import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils._pytree import tree_map

from hybrid_engine.extensions.deepspeed.accelerator import get_accelerator
from hybrid_engine.extensions.deepspeed.utils import RepeatingLoader, print_rank_0, see_memory_usage

__all__ = [
    "RepeatingLoader",
    "clip_grad_norm_",
    "empty_cache",
    "ensure_directory_exists",
    "move_to_device",
    "noop_decorator",
    "print_rank_0",
    "see_memory_usage",
    "set_random_seed",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] = torch.is_tensor) -> Any:
    """`item`, a tensor or lists, tuples and dicts of them, on `device`; what is not to be moved stays as it is."""
    return tree_map(lambda value: value.to(device) if criterion_func(value) else value, item)


def set_random_seed(seed: int) -> None:
    """Seeds Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Makes the folder that the file `filename` would be in."""
    os.makedirs(os.path.dirname(os.path.abspath(filename)), exist_ok=True)


def empty_cache() -> None:
    """Collects garbage, and gives free memory of the allocator back."""
    gc.collect()
    get_accelerator().empty_cache()


def noop_decorator(func: Function) -> Function:
    """Returns `func` as it is."""
    return func
