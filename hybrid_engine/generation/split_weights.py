"""Containers on the parts that a plan trains: the processes of a unit generate together from what each holds."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.containers.tensor_parallel import Cut, TensorParallel, read_whole
from hybrid_engine.distributed.processes import get_rank
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.generation.model_group import ModelGroup, join_model_group, join_stages
from hybrid_engine.zero.split_module import StagedModule, num_stages_of, unit_size_of

OPTION = "plan_ngpus"


def read_part(parameter: torch.Tensor, cut: Cut | None, rank: int, name: str) -> torch.Tensor:
    """What `rank` generates with, out of what its unit holds.

    Of a whole parameter, and of a part that is just this one, a view, or a copy where that is several ranges. Other
    parts are gathered from the unit and cut anew: a copy, and collective.

    RuntimeError where ZeRO has the parameter shared out.
    """
    if not isinstance(parameter, DTensor):
        return read_whole(parameter, cut, rank, name)
    if parameter.device_mesh.ndim > 1:
        raise RuntimeError(f"{name} is not gathered; gather the weights before binding them")
    placement = parameter.placements[0]
    with torch.no_grad():
        if not isinstance(placement, Shard):
            return read_whole(parameter.to_local(), cut, rank, name)
        if cut == _cut_of(parameter, placement):
            return read_whole(parameter.to_local(), None, rank, name)
        whole = parameter.full_tensor()
        return whole if cut is None else cut.of(whole, rank).clone()  # a view would keep all of it


def _cut_of(parameter: DTensor, placement: Shard) -> Cut:
    length, count = parameter.shape[placement.dim], parameter.device_mesh.size()
    size = -(-length // count)
    bounds = [(min(rank * size, length), min((rank + 1) * size, length)) for rank in range(count)]
    return Cut(placement.dim, tuple((bound,) for bound in bounds))


def check_parts(model: nn.Module, is_exact: bool, tp_size: int) -> None:
    """ValueError where no containers of `model`, which a plan has split, can generate in its parts; collective.

    A model that has none generates by its own `generate()`, which its hooks put on parts; in stages it cannot.
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
    agree(lambda: _check_containers(model, size // num_stages_of(model)))


def _check_containers(model: nn.Module, num_parts: int) -> None:
    parallel = TensorParallel(rank=get_rank() % num_parts, size=num_parts, read=read_part, option=OPTION)
    root = generating(model)
    try:
        containers = InferenceModel(root, parallel)
    except UnsupportedModelError as error:
        if isinstance(model, StagedModule):
            raise ValueError(
                f"hybrid_engine.enabled: a plan with stages generates on containers, and {error}; make one without "
                "stages, or leave hybrid_engine out of the config"
            ) from error
        return
    if isinstance(model, StagedModule):
        layers_of_stages(model, root, containers)


def generating(model: nn.Module) -> nn.Module:
    """The module whose containers generate: `model`, or what it was made from where it has some stages of that."""
    return model.original() if isinstance(model, StagedModule) else model


def layers_of_stages(model: StagedModule, root: nn.Module, containers: InferenceModel) -> tuple[range, ...]:
    """The layers of each stage of the plan; `root` is what `containers` were made of.

    ValueError where rollouts cannot go through them in the plan's stages.
    """
    num_stages = model.num_stages
    paths = {id(module): path for path, module in root.named_modules()}
    ends: list[tuple[Any, int]] = [
        (containers.embedding, 0),
        (containers.position_embedding, 0),
        (containers.embedding_norm, 0),
    ]
    ends += [(containers.project_in, 0), (containers.project_out, num_stages - 1)]
    ends += [(containers.final_norm, num_stages - 1), (containers.lm_head, num_stages - 1)]
    for view, stage in ends:
        path = None if view is None else paths[id(view.module)]
        if path is not None and stage not in model.stages_of(path):
            raise ValueError(
                f"plan.stages: {path!r} is of stage {min(model.stages_of(path))}, and rollouts have it in stage "
                f"{stage}; move it there"
            )
    layers = [paths[id(layer.module)] for layer in containers.layers]
    stages = [sorted(model.stages_of(path)) for path in layers]
    for path, found in zip(layers, stages, strict=True):
        if len(found) != 1:
            raise ValueError(f"plan.stages: {path!r} lies in the stages {found}, and rollouts take it in one; join it")
    order = [found[0] for found in stages]
    counts = [order.count(stage) for stage in range(num_stages)]
    if order != sorted(order) or not all(counts):
        raise ValueError(
            f"plan.stages: the {len(layers)} layers are of the stages {order}; rollouts need at least one in each of "
            f"the {num_stages}, in their order; name the modules of each stage"
        )
    return tuple(range(sum(counts[:stage]), sum(counts[: stage + 1])) for stage in range(num_stages))


def share_unit(model: nn.Module, device: torch.device) -> ModelGroup:
    """The group in which the processes of a unit generate, given the same prompts; collective."""
    if isinstance(model, StagedModule):
        root = generating(model)
        bounds = layers_of_stages(model, root, InferenceModel(root))
        num_parts = model.unit_size // model.num_stages
        group = join_stages(num_parts, model.num_stages, device, OPTION, bounds)
        group = replace(group, stage_option=OPTION).without_module()
    else:
        group = join_model_group(unit_size_of(model), device, OPTION)
    return replace(group, has_same_prompts=True, parallel=replace(group.parallel, read=read_part))
