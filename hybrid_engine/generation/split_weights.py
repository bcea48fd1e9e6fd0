"""Containers on the parts that a plan trains: the processes of a unit generate together from what each holds."""

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.containers.tensor_parallel import Cut, TensorParallel, read_whole
from hybrid_engine.distributed.processes import get_rank
from hybrid_engine.generation.model_group import ModelGroup, join_model_group
from hybrid_engine.zero.split_module import unit_size_of

OPTION = "plan_ngpus"


def read_part(parameter: torch.Tensor, cut: Cut | None, rank: int, name: str) -> torch.Tensor:
    """What `rank` generates with, out of what it holds: a view, or a copy where that is several ranges.

    ValueError where it holds another part, RuntimeError where ZeRO has it shared out.
    """
    if not isinstance(parameter, DTensor):
        return read_whole(parameter, cut, rank, name)
    if parameter.device_mesh.ndim > 1:
        raise RuntimeError(f"{name} is not gathered; gather the weights before binding them")
    with torch.no_grad():
        local = read_whole(parameter.to_local(), None, rank, name)
    placement = parameter.placements[0]
    if not isinstance(placement, Shard):
        return local if cut is None else cut.of(local, rank)
    if cut != _cut_of(parameter, placement):
        wanted = "all of it" if cut is None else f"{list(cut.ranges[rank])} of dimension {cut.dim}"
        raise ValueError(
            f"{name}: the plan splits a parameter of shape {tuple(parameter.shape)} along dimension {placement.dim}, "
            f"and rank {rank} generates with {wanted}; place it so, or leave it whole, of which each takes its part"
        )
    return local


def _cut_of(parameter: DTensor, placement: Shard) -> Cut:
    length, count = parameter.shape[placement.dim], parameter.device_mesh.size()
    size = -(-length // count)
    bounds = [(min(rank * size, length), min((rank + 1) * size, length)) for rank in range(count)]
    return Cut(placement.dim, tuple((bound,) for bound in bounds))


def check_parts(model: nn.Module, is_exact: bool, tp_size: int) -> None:
    """ValueError where containers of `model`, which a plan has split, could not read its parts; local.

    A model that has none generates by its own `generate()`, which its hooks put on parts.
    """
    size = unit_size_of(model)
    if size == 1:
        return
    if tp_size > 1:
        raise ValueError(
            f"hybrid_engine.inference_tp_size={tp_size}: a parallel module generates on the {size} processes of a "
            "unit, by its plan; leave it out"
        )
    if is_exact:
        raise ValueError("hybrid_engine.exact: a model that a plan splits sums in parts; leave exact out of the config")
    try:
        parallel = TensorParallel(rank=get_rank() % size, size=size, read=read_part, option=OPTION)
        InferenceModel(model, parallel).bind()
    except UnsupportedModelError:
        return


def share_unit(size: int, device: torch.device) -> ModelGroup:
    """The group in which a unit of `size` processes generates, given the same prompts; collective."""
    group = join_model_group(size, device, OPTION)
    return replace(group, has_same_prompts=True, parallel=replace(group.parallel, read=read_part))
