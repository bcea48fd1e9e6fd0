"""The memory layout of a model trained by other code: whole, sharded by FSDP2, or not readable by containers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hybrid_engine.distributed.processes import get_rank, get_world_size
from hybrid_engine.zero.fsdp2_private import keeping_reshard_after_forward, make_root
from hybrid_engine.zero.sharding import Sharding

NUMBERS = ("eps", "scal", "multiplier", "cap", "alpha", "limit")
"""Parts of the names that transformers and peft give the numbers that layers compute with."""


def find_sharding(model: nn.Module) -> Sharding:
    """The current sharding of `model`, from FSDP2's own marks; a whole model has no partners."""
    wrapped = fsdp_modules(model)
    if not wrapped:
        return Sharding(root=model, stage=0, world_size=1, rank=0)
    make_root(wrapped[0])
    mesh = next(param.device_mesh for param in model.parameters() if isinstance(param, DTensor))
    # 3: between two calls a process has its shards, even if FSDP2 keeps more from a forward to its backward pass.
    return Sharding(root=model, layers=wrapped[1:], stage=3, world_size=get_world_size(), rank=get_rank(), mesh=mesh)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules that FSDP2 gathers one at a time; the model itself comes first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reason_unreadable(model: nn.Module) -> str | None:
    """The reason why containers cannot read the weights of `model` in their current layout, or None."""
    wrapped = fsdp_modules(model)
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return "its weights are flattened by FSDP's first version; shard it by fully_shard (fsdp_version: 2)"
    if wrapped and wrapped[0] is not model:
        return "parts of it are sharded by fully_shard, and itself it is not; call fully_shard(model) after its layers"
    parameters = list(model.parameters())
    if not wrapped and any(isinstance(parameter, DTensor) for parameter in parameters):
        return "its weights are DTensors that FSDP2 does not gather"
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        return "its weights are partitioned by DeepSpeed"
    if any(parameter.is_meta for parameter in parameters):
        return "some of its weights lie elsewhere until a layer needs them (device_map)"
    if len({parameter.device for parameter in parameters}) > 1:
        return "its weights lie on several devices"
    if not all(parameter.is_floating_point() for parameter in parameters):
        return "its weights are quantised"
    return None


def fingerprint(model: nn.Module) -> tuple[object, ...]:
    """Equal while `find_sharding` and `reason_unreadable` have the same results, and dtype, device and numbers do."""
    first = next(model.parameters())
    is_distributed = torch.distributed.is_initialized()
    layout = (tuple(map(id, fsdp_modules(model))), first.dtype, first.device, is_distributed)
    return (*layout, reason_unreadable(model), *_frequencies(model), *_numbers(model))


def _frequencies(model: nn.Module) -> Iterator[object]:
    """The rotary frequencies of a model, and how often they were changed in place.

    Without those that the model's own forward pass changes with the length of its input.
    """
    for name, buffer in model.named_buffers():
        module = model.get_submodule(name.rpartition(".")[0])
        kind = str(getattr(module, "rope_type", ""))
        if name.endswith("inv_freq") and "dynamic" not in kind and kind != "longrope":
            yield id(buffer), 0 if buffer.is_inference() else buffer._version


def _numbers(model: nn.Module) -> Iterator[float]:
    """The plain numbers in modules that containers copy, for adapters also those stored by adapter name.

    Other numbers may be statistics of the user's code, which change at every step.
    """
    for module in model.modules():
        for name, value in vars(module).items():
            if not any(word in name for word in NUMBERS):
                continue
            if type(value) is float:
                yield value
            elif type(value) is dict:
                yield from (number for number in value.values() if type(number) is float)


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """Inside, removes accelerate's wrapper of `forward()` for mixed precision; weights keep their dtype."""
    wrapped, own = model.__dict__.get("forward"), model.__dict__.get("_original_forward")
    if wrapped is None or own is None:
        yield
        return
    model.forward = own
    try:
        yield
    finally:
        model.forward = wrapped


@contextmanager
def as_found(sharding: Sharding) -> Iterator[None]:
    """At the end, returns a sharded model to shards, with FSDP2's settings as the user made them."""
    if not sharding.is_sharded:
        yield
        return
    sharding.reshard()  # parameters left gathered by an evaluation may be older than the shards
    with keeping_reshard_after_forward(sharding.fsdp_modules()):
        yield
