"""DeepSpeed's helpers: `deepspeed.utils`, `runtime.utils`, `runtime.dataloader` and functions on sharded parameters.

Also `checkpoint.utils`, `compression.helper`, `runtime.zero.partition_parameters` and `offload_config`. `utils.logging`
is this module too, so Python's own is not imported under that name.

The functions on local values, `safe_get_local_...` and `safe_set_local_...`, take the parameters of a stage 3 model,
and are not collective. A local value has the shape of `param.ds_tensor`: rows of the whole, where there are several
processes; DeepSpeed's are flat, which values to set may be too. FSDP2 gathers whole layers, so nothing depends on the
marks of leaf modules (`utils.z3_leaf_module`), which DeepSpeed gathers whole; they are kept for code that reads them
again.
"""

import gc
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import cache, reduce
from logging import INFO, getLogger
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.utils._pytree import tree_map

from hybrid_engine.distributed.dataloader import TrainingDataLoader
from hybrid_engine.distributed.processes import get_rank
from hybrid_engine.engine.deepspeed_engine import (
    _grad,
    _link,
    _master,
    _state,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from hybrid_engine.extensions.deepspeed.accelerator import get_accelerator
from hybrid_engine.optim.masters import renew_masters
from hybrid_engine.optim.state_offload import OffloadStateTypeEnum
from hybrid_engine.zero.gathered_parameters import (
    GatheredParameters,
    ZeroParamStatus,
    register_external_parameter,
    unregister_external_parameter,
)
from hybrid_engine.zero.init import Init
from hybrid_engine.zero.sharding import local_tensor

_orig_torch_arange = torch.arange
MODULE_MARK = "_z3_leaf"
PARAMETER_MARK = "ds_z3_leaf_module"
Function = TypeVar("Function", bound=Callable[..., Any])
logger = getLogger("hybrid_engine")
DeepSpeedDataLoader = TrainingDataLoader


__all__ = [
    "MODULE_MARK",
    "PARAMETER_MARK",
    "DeepSpeedDataLoader",
    "GatheredParameters",
    "Init",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "OnDevice",
    "RepeatingLoader",
    "ZeroParamStatus",
    "_orig_torch_arange",
    "clip_grad_norm_",
    "clone_tensors_for_torch_save",
    "empty_cache",
    "ensure_directory_exists",
    "get_z3_leaf_modules",
    "instrument_w_nvtx",
    "is_compile_supported",
    "is_zero_param",
    "log_dist",
    "log_dist_once",
    "logger",
    "move_to_device",
    "noop_decorator",
    "print_rank_0",
    "recursive_getattr",
    "recursive_setattr",
    "register_external_parameter",
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
    "unregister_external_parameter",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]


class OffloadDeviceEnum(str, Enum):
    """Where to; `offload_states()` goes to the CPU alone."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


def is_zero_param(parameter: Any) -> bool:
    """Whether `parameter` is one of a stage 3 model."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """`fn`, as it is: `Init` changes none of torch's constructors. transformers replaces this name while it loads."""
    return fn


@torch.no_grad()
def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """The shard as the optimizer steps it, in fp32."""
    _check_sharded(param)
    master = _master(param)
    if master is None:
        return local_tensor(param).float().clone()
    if isinstance(param, DTensor) == isinstance(master, DTensor):
        renew_masters([(local_tensor(param), local_tensor(master))])
    return local_tensor(master).float().clone()


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the shard, and its fp32 master."""
    _check_sharded(param)
    master = _master(param)
    for target in (param,) if master is None else (master, param):
        _assign(target, value)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The shard's gradient between `backward()` and `step()`, in fp32; None where there is none.

    In fp16 it is multiplied by the loss scale.
    """
    _check_sharded(param)
    grad = _grad(param)
    return None if grad is None else local_tensor(grad).float().clone()


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets what `safe_get_local_grad` gives; raises ValueError where there is none."""
    _check_sharded(param)
    grad = _grad(param)
    if grad is None:
        raise ValueError(
            "safe_set_local_grad(): the parameter has no gradient; call it between the backward() that ends the "
            "accumulation and step()"
        )
    _assign(grad, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """The optimizer's tensor `optim_state_key` of the shard; None for a parameter that is not trained.

    Raises:
        ValueError: there is no such state, or none yet: it comes with the first step.
    """
    _check_sharded(param)
    return None if _link(param) is None else local_tensor(_state(param, optim_state_key)).clone()


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets what `safe_get_local_optimizer_state` gives."""
    _check_sharded(param)
    _assign(_state(param, optim_state_key), value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Sets each whole gradient that there is to `update_func(gradient, parameter)`; collective where sharded."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def _check_sharded(param: nn.Parameter) -> None:
    if not hasattr(param, "ds_id"):
        raise ValueError(
            "safe_get_local_...(), safe_set_local_...(): the parameter is not of a stage 3 engine, it has no shard; "
            "use safe_get_full_...() and safe_set_full_...()"
        )


@torch.no_grad()
def _assign(target: torch.Tensor, value: torch.Tensor) -> None:
    own = local_tensor(target)
    if value.numel() != own.numel():
        raise ValueError(
            f"safe_set_local_...(): a value of shape {tuple(value.shape)} for a shard of shape {tuple(own.shape)}; "
            f"give this process's part, of the shape of param.ds_tensor"
        )
    own.copy_(value.reshape(own.shape))


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks the modules of those classes, given also by name, and returns them; ValueError if there are none."""
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Takes the marks off the modules of those classes, and returns them; ValueError if there are none."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks the module `model` itself, or takes its mark off."""
    setattr(model, MODULE_MARK, flag)
    for param in model.parameters():
        setattr(param, PARAMETER_MARK, model if flag else None)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by their names in `named_modules()`; returns them, and the names that there are not."""
    modules = dict(model.named_modules())
    return _mark_found(modules, module_names, lambda name, wanted: name == wanted, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by the ends of their names in `named_modules()`; returns them, and the ends that there are not."""
    modules = dict(model.named_modules())
    return _mark_found(modules, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of `model`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module `model` is marked."""
    return bool(getattr(model, MODULE_MARK, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether the parameter belonged to a marked module when that was marked.

    `initialize()` on several processes makes other parameters, so modules are to be marked after it for this.
    """
    return getattr(model, PARAMETER_MARK, None) is not None


def _mark(model: nn.Module, classes: Sequence[type | str], flag: bool, must_exist: bool) -> list[nn.Module]:
    found = [module for module in model.modules() if any(_is_of(module, kind) for kind in classes)]
    if must_exist and not found:
        raise ValueError(f"leaf_module_classes={list(classes)}: the model has no module of them; choose from its own")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_of(module: nn.Module, kind: type | str) -> bool:
    if isinstance(kind, str):
        own = type(module)
        return kind in (own.__name__, own.__qualname__, f"{own.__module__}.{own.__qualname__}")
    return isinstance(module, kind)


def _mark_found(
    modules: dict[str, nn.Module],
    wanted: Sequence[str],
    fits: Callable[[str, str], bool],
    flag: bool,
    must_exist: bool,
) -> tuple[list[nn.Module], list[str]]:
    found = [module for name, module in modules.items() if any(fits(name, entry) for entry in wanted)]
    missing = [entry for entry in wanted if not any(fits(name, entry) for name in modules)]
    if must_exist and missing:
        raise ValueError(f"the model has no modules of the names {missing}; see its named_modules()")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing


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
