"""Removes the wrapping of FSDP2 and an engine from a module: for copies of it, and for an engine that takes it over.

FSDP2 refuses to copy a module that it has wrapped. Below stage 3 an engine's module is whole, and scripts copy it, for
a moving average or a target network: the copy is a module of the class that the user wrote, without an engine.

Also here: a model that is sharded before its engine is built, by zero.Init or by an engine that only evaluates.
"""

import copy
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hybrid_engine.config import EngineConfig
from hybrid_engine.config.blocks import ZERO_STAGES, StageRules
from hybrid_engine.zero.fsdp2_private import (
    end_passes,
    forget_states,
    forget_wrapping,
    hook_ids,
    on_wrapped_class,
    plain_class,
)
from hybrid_engine.zero.sharding import Sharding, full_tensor

_evaluated: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_OPTIONS = {torch.float16: "fp16.enabled", torch.bfloat16: "bf16.enabled"}


class EngineHook:
    """A hook that an engine has put on a module; copies of the module do not have it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def is_forward_method(name: str) -> bool:
    """Whether a method of this name is a forward pass, such as a value model's `forward_value`."""
    return name.startswith("forward_")


def allow_copies(module: FSDPModule) -> None:
    """Makes `copy.deepcopy` and `pickle` produce plain modules from `module`, as long as its parameters are whole."""
    on_wrapped_class(module, "__deepcopy__", _copy)
    on_wrapped_class(module, "__reduce_ex__", _reduce)


def _copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    _check_whole(module, "copy.deepcopy")
    with _plain(module):
        return copy.deepcopy(module, memo)


def _reduce(module: nn.Module, protocol: Any) -> Any:
    _check_whole(module, "pickle")
    return operator.getitem, ([copy.deepcopy(module)], 0)  # pickle requires objects of the class itself from it


def _check_whole(module: nn.Module, what: str) -> None:
    shard = next((name for name, param in module.named_parameters() if type(param) is DTensor), None)
    if shard is not None:
        raise ValueError(
            f"{what}: of {shard} this process has a shard only, which another module cannot have; run it inside "
            f"zero.GatheredParameters(list(module.parameters())), which makes the parameters whole"
        )


@contextmanager
def _plain(module: nn.Module) -> Iterator[None]:
    """Inside, `module` and its parts are as before an engine wrapped them, with the current parameters."""
    parts: list[Any] = list(module.modules())
    before = [(part.__class__, part.__dict__) for part in parts]
    try:
        for part in parts:
            # Users hold handles of hooks, which refer to these dictionaries, so copies of them are changed.
            hooks = {name: copy.copy(held) for name, held in _hooks_of(part).items()}
            object.__setattr__(part, "__dict__", {**vars(part), **hooks})
        unwrap(module)
        yield
    finally:
        for part, (kind, attributes) in zip(parts, before, strict=True):
            part.__class__ = kind
            object.__setattr__(part, "__dict__", attributes)


def unwrap(root: nn.Module) -> None:
    """Restores the classes that the parts of `root` had before they were wrapped; local.

    Parameters stay as they are, whole or shards.
    """
    parts = list(root.modules())
    wrapped = [part for part in parts if isinstance(part, FSDPModule)]
    ids = hook_ids(wrapped)
    for part in parts:
        for hooks in _hooks_of(part).values():
            for number in [number for number, hook in hooks.items() if number in ids or isinstance(hook, EngineHook)]:
                del hooks[number]
    for part in wrapped:
        kind = plain_class(part)
        for name in [name for name in vars(part) if is_forward_method(name) and hasattr(kind, name)]:
            del vars(part)[name]  # gathers around the method of that name
        forget_wrapping(vars(part))
        cast(Any, part).__class__ = kind


def _hooks_of(part: nn.Module) -> dict[str, dict[int, Any]]:
    """torch's dictionaries of hooks (by id), by name; transformers has lists of handles under similar names."""
    held = vars(part).items()
    return {name: kept for name, kept in held if name.startswith("_") and "_hooks" in name and isinstance(kept, dict)}


def note_evaluated(root: nn.Module) -> None:
    """Records that the engine that has wrapped `root` only evaluates."""
    _evaluated.add(root)


def can_take_over(root: nn.Module) -> bool:
    """Whether `root` has wrapped parts, and all of them were wrapped by engines that only evaluate."""
    parts = list(root.modules())
    evaluated = {part for whole in parts if whole in _evaluated for part in whole.modules()}
    wrapped = [part for part in parts if isinstance(part, FSDPModule)]
    return bool(wrapped) and evaluated.issuperset(wrapped)


def take_over(root: nn.Module, rules: StageRules, mesh_shape: tuple[int, ...]) -> None:
    """Unwraps the parts of `root` that engines which only evaluate have wrapped, for another engine; collective.

    It keeps its shards if they have the layout of an engine with these `rules` and this mesh; otherwise the parameters
    become whole.
    """
    if not can_take_over(root):
        return
    shapes = {param.device_mesh.shape for param in root.parameters() if isinstance(param, DTensor)}
    wrapped = [part for part in root.modules() if isinstance(part, FSDPModule)]
    for part in wrapped:
        end_passes(part)
        part.reshard()
    unwrap(root)
    forget_states(wrapped)
    for part in root.modules():
        _evaluated.discard(part)
    if not rules.shards_parameters or shapes != {mesh_shape}:
        _make_whole(root)


def _make_whole(root: nn.Module) -> None:
    whole: dict[int, nn.Parameter] = {}
    for part in root.modules():
        for name, param in part._parameters.items():
            if isinstance(param, DTensor):
                if id(param) not in whole:  # tied parameters stay one
                    value = full_tensor(param).to(param.device)
                    whole[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
                part._parameters[name] = whole[id(param)]


def found_sharding(before: Sharding) -> Sharding:
    """The current layout of a module, for an evaluating engine from which another engine has taken it over."""
    root = before.root
    if any(type(param) is DTensor for param in root.parameters()):
        layers = [part for part in root.modules() if isinstance(part, FSDPModule) and part is not root]
        return replace(before, layers=cast(list[nn.Module], layers))
    return Sharding(root=root, stage=0, world_size=before.world_size, rank=before.rank)


def check_built_shards(module: nn.Module, stage: int, mesh_shape: tuple[int, ...]) -> None:
    """Raises ValueError unless shards in `module` already have the layout of an engine of this stage and mesh.

    An engine does not take over a model that another one has sharded and trains.
    """
    if can_take_over(module):
        return
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        raise ValueError(
            "model: another engine has sharded it already to train it, and it stays with that engine also when the "
            "engine is deleted; build the model again for this one, or copy.deepcopy it"
        )
    shards: list[Any] = [param for param in module.parameters() if _is_shard(param)]
    if shards and not ZERO_STAGES[stage].shards_parameters:
        raise ValueError(
            f"zero_optimization.stage={stage} and a model built under zero.Init, which shards parameters, contradict "
            f"each other; set the stage to 3, or build the model without zero.Init"
        )
    shapes = {shard.device_mesh.shape for shard in shards}
    if shapes - {mesh_shape}:
        raise ValueError(
            f"model: zero.Init sharded it over processes in the shape {shapes}, the config over {mesh_shape}; give "
            f"both the same config"
        )


def _is_shard(param: Any) -> bool:
    """Whether ZeRO has sharded the parameter; a plan's parts are on other axes."""
    return isinstance(param, DTensor) and "fsdp" in (param.device_mesh.mesh_dim_names or ())


@contextmanager
def placeholders(module: nn.Module) -> Iterator[None]:
    """Inside, sharded parameters are replaced by plain ones without storage; afterwards they are restored."""
    places = [
        (part, name, param) for part in module.modules() for name, param in part._parameters.items() if _is_shard(param)
    ]
    stand_ins = {id(param): _without_storage(param) for _, _, param in places}
    for part, name, param in places:
        part._parameters[name] = stand_ins[id(param)]
    yield
    for part, name, param in places:
        part._parameters[name] = param
    if places:
        for part in module.modules():
            if isinstance(part, FSDPModule):  # FSDP2 takes over the shards at the first gather
                part.unshard()
                part.reshard()


def _without_storage(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"), param.requires_grad)


class Uncopied(nn.Module):
    """A module that cannot be copied or pickled, and whose dtype always stays the one of its config."""

    config: EngineConfig

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ValueError(
            f"copy.deepcopy: a {type(self).__name__} is not copied, as its masters and shards belong to the model it "
            f"was given; copy engine.module, or initialize() another model and load_checkpoint() there"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError(
            f"pickle: a {type(self).__name__} is not pickled; save_checkpoint() keeps everything, and "
            f"save_16bit_model() or engine.module.state_dict() the weights"
        )

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """nn.Module's `to` for devices; raises ValueError for a dtype other than that of the parameters."""
        _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None:
            self._check_dtype("to()", dtype)
        return super().to(*args, **kwargs)

    def float(self) -> Any:
        """Raises ValueError unless the parameters are in fp32."""
        self._check_dtype("float()", torch.float32)
        return self

    def double(self) -> Any:
        """Raises ValueError: no engine supports fp64."""
        self._check_dtype("double()", torch.float64)
        return self

    def half(self) -> Any:
        """Raises ValueError unless the parameters are in fp16."""
        self._check_dtype("half()", torch.float16)
        return self

    def bfloat16(self) -> Any:
        """Raises ValueError unless the parameters are in bf16."""
        self._check_dtype("bfloat16()", torch.bfloat16)
        return self

    def type(self, dst_type: Any) -> Any:  # type: ignore[override]
        """Raises ValueError unless the parameters have this dtype."""
        self._check_dtype("type()", dst_type)
        return self

    def _check_dtype(self, what: str, dtype: Any) -> None:
        if dtype == self.config.dtype:
            return
        option = _OPTIONS.get(dtype)
        remedy = f'set "{option}" in the config of initialize()' if option else "leave it out"
        raise ValueError(
            f"{what}: {dtype} is not the dtype of this engine, {self.config.dtype}, which its config chose for the "
            f"parameters and their masters; {remedy}"
        )
