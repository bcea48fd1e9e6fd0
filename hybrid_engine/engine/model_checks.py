"""Checks that a model can be trained with its config, and can generate, before the model is changed."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hybrid_engine.config import EngineConfig
from hybrid_engine.distributed.processes import check_same_architecture, default_device, get_world_size, on_rank_zero
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.generation.memory import free_and_total_bytes
from hybrid_engine.metrics.memory_plan import format_bytes
from hybrid_engine.metrics.monitor import check_packages, prepare_outputs
from hybrid_engine.optim.build import check_choices, check_group_options, check_quantised
from hybrid_engine.optim.lr_schedules import check_rates
from hybrid_engine.optim.muon import split_groups
from hybrid_engine.optim.param_groups import NamedGroup, name_groups
from hybrid_engine.zero.layer_groups import check_callable, check_uncompiled, find_layers
from hybrid_engine.zero.split_module import check_split, num_stages_of, unit_size_of
from hybrid_engine.zero.wrapping import check_built_shards, mesh_shape, offloads_parameters


def check_training(
    model: nn.Module, config: EngineConfig, optimizer: Any, model_parameters: Any, lr_scheduler: Any, trains: bool
) -> list[NamedGroup]:
    """The names of the parameters to step, in groups; raises ValueError if the model cannot be trained. Collective.

    Args:
        model: the model given to `initialize()`, still unchanged; the same architecture on every process.
        config: the config, as read.
        optimizer: an optimizer, a function that builds one, or None.
        model_parameters: the parameters for a function's or the config's optimizer; None is all that require a
            gradient.
        lr_scheduler: a scheduler, a function that builds one, or None.
        trains: whether there is an optimizer.
    """
    stepped = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else model_parameters

    def groups_if_they_do() -> list[NamedGroup]:
        check_split(model, config)
        check_layer_fits(model, config.dtype)
        check_choices(model, optimizer, lr_scheduler, config)
        groups = name_groups(stepped, model) if trains else []
        if optimizer is None and config.optimizer is not None and config.optimizer.type == "Muon":
            groups = split_groups(groups, model, config.optimizer.params)
        check_group_options(groups)
        if config.scheduler is not None and lr_scheduler is None:
            check_rates(config.scheduler, len(groups))
        check_packages(config)
        return groups

    groups = agree(groups_if_they_do)  # processes may hold different parameters, for example in stages
    on_rank_zero(lambda: prepare_outputs(config))
    check_quantised(model, get_world_size() > 1 or offloads_parameters(config))
    check_same_architecture(model, 1 if num_stages_of(model) == 1 else unit_size_of(model))
    check_callable(model)
    num_units = get_world_size() // unit_size_of(model)
    check_built_shards(model, config.zero_optimization.stage, mesh_shape(config, num_units))
    return groups


def check_layer_fits(model: nn.Module, dtype: torch.dtype) -> None:
    """Raises ValueError if a GPU's memory cannot hold the largest layer in `dtype`; local.

    Every stage of ZeRO holds one whole layer at a time; under a plan of `parallelize` processes have parts of one.
    """
    device = default_device()
    layers = [] if device.type == "cpu" or unit_size_of(model) > 1 else find_layers(model)
    wanted = max((_bytes_to_come(layer, dtype) for layer in layers), default=0)
    if not wanted:
        return
    free, total = free_and_total_bytes(device)
    if wanted > free:
        held = "" if wanted > total else "; another process may hold the rest (nvidia-smi lists them)"
        raise ValueError(
            f"model: one layer takes {format_bytes(wanted)} in {str(dtype).removeprefix('torch.')}, and {device} has "
            f"{format_bytes(free)} of {format_bytes(total)} free{held}; use a GPU with more memory, or a smaller model"
        )


def _bytes_to_come(layer: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the parameters of `layer` that are not yet whole on a GPU."""
    missing = [p for p in layer.parameters() if not p.is_cuda or isinstance(p, DTensor)]
    return sum(p.numel() * (dtype.itemsize if p.is_floating_point() else p.element_size()) for p in missing)


def check_generates(model: nn.Module) -> None:
    """Raises ValueError if a hybrid engine could not generate with `model`; local."""
    config = getattr(model, "config", None)
    check_uncompiled("initialize", model)
    if not hasattr(type(model), "generate") or getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"hybrid_engine.enabled: {type(model).__name__} is no decoder-only language model with generate(); "
            "pass one, or leave hybrid_engine out of the config"
        )
    missing = [name for name in ("config", "generation_config") if getattr(model, name, None) is None]
    if missing:
        raise ValueError(
            f"hybrid_engine.enabled: {type(model).__name__} has generate() but no {' and no '.join(missing)}; a module "
            "that wraps a language model must have the language model's, or leave hybrid_engine out of the config"
        )
