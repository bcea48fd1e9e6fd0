"""`deepspeed.utils`, `runtime.utils`, `runtime.dataloader`, `checkpoint.utils` and `compression.helper`: helpers.

`utils.logging` is this module too, so Python's own is not imported under that name.
"""

import gc
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, reduce
from logging import INFO, getLogger
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils._pytree import tree_map

from hybrid_engine.distributed.dataloader import TrainingDataLoader
from hybrid_engine.distributed.processes import get_rank
from hybrid_engine.engine.deepspeed_engine import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from hybrid_engine.extensions.deepspeed.accelerator import get_accelerator
from hybrid_engine.extensions.deepspeed.partitioned_parameters import (
    get_z3_leaf_modules,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)

__all__ = [
    "DeepSpeedDataLoader",
    "OnDevice",
    "RepeatingLoader",
    "clip_grad_norm_",
    "clone_tensors_for_torch_save",
    "empty_cache",
    "ensure_directory_exists",
    "get_z3_leaf_modules",
    "instrument_w_nvtx",
    "is_compile_supported",
    "log_dist",
    "log_dist_once",
    "logger",
    "move_to_device",
    "noop_decorator",
    "print_rank_0",
    "recursive_getattr",
    "recursive_setattr",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "see_memory_usage",
    "set_random_seed",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]


Function = TypeVar("Function", bound=Callable[..., Any])
logger = getLogger("hybrid_engine")
DeepSpeedDataLoader = TrainingDataLoader


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


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = INFO) -> None:
    """Logs `message` on the given ranks; None, or -1 among them, means all."""
    if ranks is None or -1 in ranks or get_rank() in ranks:
        logger.log(level, "[Rank %d] %s", get_rank(), message)


@cache
def log_dist_once(message: str, ranks: tuple[int, ...] | None = None, level: int = INFO) -> None:
    """Logs `message` as `log_dist` does, the first time."""
    log_dist(message, ranks, level)


def print_rank_0(message: str) -> None:
    """Prints on rank 0."""
    if get_rank() == 0:
        print(message, flush=True)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Logs `message` and the memory of rank 0's device, now and at most, in GiB; only with `force`, as in DeepSpeed."""
    if force and get_rank() == 0:
        device = get_accelerator()
        now, most = device.memory_allocated() / 2**30, device.max_memory_allocated() / 2**30
        logger.warning("%s | allocated %.2f GiB, at most %.2f GiB", message, now, most)


class OnDevice:
    """Modules built inside have parameters of `dtype` on `device`; on "meta" they have no storage."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled
        self._dtype_before = dtype

    def __enter__(self) -> None:
        if self.enabled:
            self._dtype_before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self.device.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.enabled:
            self.device.__exit__(*error)
            torch.set_default_dtype(self._dtype_before)


def instrument_w_nvtx(func: Function) -> Function:
    """`func` itself: torch.profiler shows it by its name."""
    return func


class RepeatingLoader:
    """Begins `loader` again whenever it ends; a training script takes `next()` of it."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """`item` with every tensor in it copied to `device`, so that nothing of a larger storage is saved with it."""
    return tree_map(lambda x: x.detach().to(device, copy=True) if isinstance(x, torch.Tensor) else x, item)


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The attribute at `module_name`, e.g. "module.layers.0.weight"; items of lists by their number."""
    return reduce(_get, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Sets the attribute at `module_name`."""
    *parents, name = module_name.split(".")
    setattr(reduce(_get, parents, model), name, module)


def _get(parent: Any, name: str) -> Any:
    return getattr(parent, name)


def is_compile_supported() -> bool:
    """True: PyTorch can always compile."""
    return True
