"""`zero.Init`: a model that is sharded while it is built, so that no process ever holds all of it.

    with zero.Init(config_dict_or_path="ds_config.json"):
        model = LlamaForCausalLM(config)
    engine, *_ = initialize(model=model, config="ds_config.json")

When a module's `__init__` returns, each of its own parameters becomes this process's shard of rank 0's value, a
DTensor with DeepSpeed's marks. Code that initializes weights later, in the constructor of the whole model, still sees
whole values: a parameter that is used is gathered, and sharded again after a few others were used. So the model has the
values that rank 0 would have given it without `Init`.

To detect the end of a constructor, the `__init__` of every module class is wrapped for as long as the block lasts.
Non-floating-point parameters and buffers keep their dtype. Buffers also stay on their device; `initialize()` casts
those that are saved with the weights.
"""

import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from hybrid_engine.config import EngineConfig, load_config
from hybrid_engine.config.reading import read_json
from hybrid_engine.distributed.processes import default_device, get_world_size, init_distributed, join_alone
from hybrid_engine.zero.gathered_parameters import GatheredParameters, mark_parameter
from hybrid_engine.zero.sharding import build_mesh
from hybrid_engine.zero.wrapping import offloads_parameters

KEPT_WHOLE = 4
"""Number of latest calls whose parameters stay whole after they were used; initializers use one or two at a time."""
READ_KEYS = {
    "zero_optimization": ("stage", "offload_param", "zero_hpz_partition_size", "mics_shard_size"),
    "fp16": ("enabled",),
    "bf16": ("enabled",),
    "bfloat16": ("enabled",),
}
"""Options that `Init` reads from a config; the others may still be "auto"."""

_active: "Init | None" = None


class Init:
    """Shards the parameters of modules that are built inside the block; collective: every process builds the same.

    Inside another block it does nothing, as the outer one shards. In a single process parameters are only cast, placed
    and marked.

    Args:
        module: an existing module, to shard at once.
        data_parallel_group: ignored, like `mem_efficient_linear`, `pin_memory` and `mpu`.
        remote_device: "cpu" keeps the shards in CPU memory; None follows the config.
        config_dict_or_path: a config; it sets the dtype of the parameters and the number of processes over which they
            are sharded. None keeps each parameter's dtype and shards over all processes.
        config: the old name of `config_dict_or_path`.
        enabled: False does nothing.
        dtype: overrides the config's precision.

    Raises:
        ValueError: the config's stage is not 3, or the config is not valid; `remote_device="nvme"`.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ) -> None:
        self.enabled = enabled
        self._classes: list[tuple[type[nn.Module], Callable[..., None]]] = []
        self._under_way: set[int] = set()
        self._sharded: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._built: list[weakref.ref[Any]] = []
        self._empty: list[weakref.ref[nn.Module]] = []
        self._touched: deque[GatheredParameters] = deque()
        if not enabled:
            return
        if remote_device not in (None, "none", "cpu"):
            raise ValueError(f'remote_device={remote_device!r} is not supported; use "cpu", or None')
        init_distributed()
        join_alone()  # transformers reads its rank from torch.distributed
        given = config_dict_or_path if config_dict_or_path is not None else config
        settings = _read_config({"zero_optimization": {"stage": 3}} if given is None else given)
        self.dtype = dtype if dtype is not None or given is None else settings.dtype
        self.mesh = build_mesh(settings, get_world_size()) if get_world_size() > 1 else None
        is_offloaded = remote_device == "cpu" or offloads_parameters(settings)
        self.device = torch.device("cpu") if is_offloaded else default_device()
        if module is not None:
            self._shard(module)
            self._finish()

    def __enter__(self) -> "Init":
        global _active
        if self.enabled and _active is None:
            _active = self
            self._watch_constructors()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        if _active is self:
            self._unwatch_constructors()
            _active = None
            if error is None:  # else the other processes may not reach a collective
                self._finish()

    def touch(self, params: list[Any]) -> None:
        """Gathers parameters that code in a constructor is about to use, and shards earlier ones again."""
        block = GatheredParameters(params, modifier_rank=0)
        block.__enter__()
        for param in params:
            param.ds_release = self.release
        self._touched.append(block)
        self.release(KEPT_WHOLE)

    def release(self, num_kept: int = 0) -> None:
        """Shards gathered parameters again, except those of the latest `num_kept` calls."""
        while len(self._touched) > num_kept:
            block = self._touched.popleft()
            for param in block.params:
                del param.ds_release
            block.__exit__(None, None, None)

    def adopt(self, param: Any) -> Any:
        """Makes a DTensor parameter one under construction, with its own marks."""
        mark_parameter(param)
        param.__class__ = ParameterUnderConstruction
        self._built.append(weakref.ref(param))
        return param

    def _finish(self) -> None:
        self._shard_what_was_empty()
        self.release()
        for reference in self._built:
            param = reference()
            if param is not None:
                param.__class__ = DTensor
        self._built.clear()

    def _shard_what_was_empty(self) -> None:
        """Shards parameters that got their storage after their constructor, such as by `torch.nn.utils.skip_init`."""
        empty, self._empty = self._empty, []
        for reference in empty:
            module = reference()
            if module is not None:
                self._shard(module)

    def _watch_constructors(self) -> None:
        for cls in _module_classes(nn.Module):
            self._watch(cls)
        init = self

        def watch_subclass(cls: type[nn.Module], **kwargs: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**kwargs)
            init._watch(cls)

        nn.Module.__init_subclass__ = classmethod(watch_subclass)  # type: ignore[assignment,arg-type]

    def _watch(self, cls: type[nn.Module]) -> None:
        if "__init__" in vars(cls):
            original = cls.__init__
            self._classes.append((cls, original))
            cls.__init__ = self._sharding_after(original)  # type: ignore[method-assign]

    def _unwatch_constructors(self) -> None:
        del nn.Module.__init_subclass__
        for cls, original in self._classes:
            cls.__init__ = original  # type: ignore[method-assign]
        self._classes.clear()

    def _sharding_after(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def build(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if id(module) in self._under_way:  # a base class's constructor
                original(module, *args, **kwargs)
                return
            self._under_way.add(id(module))
            try:
                original(module, *args, **kwargs)
            finally:
                self._under_way.discard(id(module))
            self._shard(module)

        return build

    @torch.no_grad()
    def _shard(self, module: nn.Module) -> None:
        places = [(part, name) for part in module.modules() for name in part._parameters]
        for part, name in places:
            param = part._parameters[name]
            if param is None or hasattr(param, "ds_id"):
                continue
            if param.is_meta:
                self._empty.append(weakref.ref(part))
                continue
            if self.mesh is None:
                param.data = self._place(param)
                mark_parameter(param)
                continue
            if param not in self._sharded:  # tied parameters stay one
                self._sharded[param] = self._build_shard(param, self.mesh)
            part._parameters[name] = self._sharded[param]

    def _build_shard(self, param: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
        # Every process keeps all of a parameter without a dimension: see `vectors_for_scalars` in sharding.py.
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0) if param.dim() else Replicate()]
        value = self._place(param).to(mesh.device_type)
        shard = distribute_tensor(value.contiguous(), mesh, placements).to(self.device)
        sharded: Any = nn.Parameter(shard, requires_grad=param.requires_grad)
        vars(sharded).update(vars(param))
        return self.adopt(sharded)

    def _place(self, param: nn.Parameter) -> torch.Tensor:
        dtype = self.dtype if param.is_floating_point() else None
        return param.data.to(device=self.device, dtype=dtype)


class ParameterUnderConstruction(DTensor):
    """A sharded parameter of a model being built; torch functions that need its values see the whole."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _active is None or _only_asks(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        _active.touch([leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is cls])
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            copied: Any = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied if _active is None else _active.adopt(copied)


QUESTIONS = {
    torch.Tensor.dim,
    torch.Tensor.size,
    torch.Tensor.numel,
    torch.Tensor.stride,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.is_contiguous,
    torch.Tensor.requires_grad_,
    torch.Tensor.register_hook,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
VALUES = (torch.Tensor.data, torch.Tensor.T, torch.Tensor.mT, torch.Tensor.H, torch.Tensor.mH)  # type: ignore[attr-defined]
"""The attributes of a tensor that give its values; the others describe it."""


def _only_asks(func: Any) -> bool:
    """Whether a torch function needs no values, such as one that reads or sets `shape` or `requires_grad`."""
    attribute = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        return not any(attribute is value for value in VALUES)
    return func in QUESTIONS


@contextmanager
def suspended() -> Iterator[None]:
    """Inside, modules are built as usual, also within a block of `Init`; modules built before are complete."""
    global _active
    init = _active
    if init is None:
        yield
        return
    init._finish()
    init._unwatch_constructors()
    _active = None
    try:
        yield
    finally:
        _active = init
        init._watch_constructors()


def _module_classes(cls: type[nn.Module]) -> Iterator[type[nn.Module]]:
    seen: set[type] = set()
    pending = list(cls.__subclasses__())
    while pending:
        current = pending.pop()
        if current not in seen and not issubclass(current, torch.jit.ScriptModule):
            seen.add(current)
            pending += current.__subclasses__()
            yield current


def _read_config(config: Mapping[str, Any] | str | os.PathLike[str]) -> EngineConfig:
    whole = config if isinstance(config, Mapping) else read_json(config)
    blocks = {
        name: {key: value for key, value in whole[name].items() if key in keys and value != "auto"}
        for name, keys in READ_KEYS.items()
        if isinstance(whole.get(name), Mapping)
    }
    settings = load_config({"train_micro_batch_size_per_gpu": 1, **blocks}, world_size=get_world_size())
    if not settings.zero_optimization.rules.shards_parameters:
        raise ValueError(
            f"zero.Init: zero_optimization.stage={settings.zero_optimization.stage} does not shard parameters; set "
            f"the stage to 3, or pass enabled=False"
        )
    return settings
