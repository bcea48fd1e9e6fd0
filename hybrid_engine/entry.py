"""`initialize`: from a model and a DeepSpeed-style config to an engine, its optimizer, dataloader and scheduler."""

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hybrid_engine.config import EngineConfig, load_config
from hybrid_engine.config.checks import check_flag, check_integer
from hybrid_engine.distributed.dataloader import TrainingDataLoader
from hybrid_engine.distributed.processes import (
    describe_process,
    gather_objects,
    get_rank,
    get_world_size,
    init_distributed,
    join_alone,
)
from hybrid_engine.engine.deepspeed_engine import DeepSpeedEngine
from hybrid_engine.engine.zero_engine import ZeroEngine
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.zero.init import suspended
from hybrid_engine.zero.split_module import unit_size_of

Initialized = tuple[ZeroEngine, ZeroOptimizer | None, TrainingDataLoader | None, LRScheduler | None]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: dict[str, Any] | str | os.PathLike[str] | None = None,
    mesh_param: Any = None,
    config_params: dict[str, Any] | str | os.PathLike[str] | None = None,
) -> Initialized:
    """Wraps `model` in an engine; the arguments and their order are those of `deepspeed.initialize`.

    Under a launcher, also for a single process, it joins the process group first, unless that was done. The model is
    changed in place.

    Args:
        args: `args.deepspeed_config` is a path to use when `config` is not given; values "auto" of the config are
            taken from here if this is a TrainingArguments of transformers.
        model: the module to train; on each process the same architecture. What `parallelize` gave with
            `lowering="eager"` is trained, and generates, under its plan.
        optimizer: an optimizer on the model's parameters, or a function of parameter groups; None takes the config's.
            Without either the engine only evaluates.
        model_parameters: parameters or groups for an optimizer that is built here; None is all that need a gradient.
        training_data: a map-style dataset; the returned dataloader is None without it.
        lr_scheduler: a scheduler on the optimizer (an LRScheduler, or an object with its methods), or a function of it;
            None takes the config's.
        distributed_port: the port to meet at when MASTER_PORT is not set.
        mpu: Megatron's description of model parallelism, of which there is none here: its size must be 1.
        dist_init_required: False forbids joining a process group here, True makes one for a process that is alone.
        collate_fn: makes a batch of a list of samples of `training_data`.
        config: the config, or the path of its JSON file.
        mesh_param: data and sequence parallel processes; there is no sequence parallelism, the second must be 1.
        config_params: the old name of `config`.

    Returns:
        The engine (a `HybridEngine` if `hybrid_engine.enabled`), its optimizer, its dataloader, its scheduler.

    Raises:
        ValueError: for an option that is missing, unknown, inconsistent, not built or not the same on all processes,
            before anything is changed.
    """
    _check_parallelism(mpu, mesh_param)
    _check_joining(dist_init_required, distributed_port)
    chosen_config = _choose_config(args, config, config_params)
    _join_processes(dist_init_required, distributed_port)
    engine_config = _load_same_config(chosen_config, args, unit_size_of(model))
    engine_class = _engine_class(engine_config)
    with suspended():
        engine = engine_class(
            model,
            engine_config,
            optimizer=optimizer,
            model_parameters=model_parameters,
            lr_scheduler=lr_scheduler,
            training_data=training_data,
            collate_fn=collate_fn,
        )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _engine_class(config: EngineConfig) -> type[DeepSpeedEngine]:
    if not config.hybrid_engine.enabled:
        return DeepSpeedEngine
    # Generation is two thirds of the package; an engine that only trains does not import it.
    from hybrid_engine.engine.deepspeed_hybrid_engine import DeepSpeedHybridEngine

    return DeepSpeedHybridEngine


def _check_parallelism(mpu: Any, mesh_param: Any) -> None:
    names = ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size")
    sizes = [getattr(mpu, name)() for name in names if hasattr(mpu, name)]
    if mpu is not None and (not sizes or max(sizes) > 1):
        raise ValueError(
            f"mpu: it says {sizes or 'nothing'} of the model parallel size, which must be 1: training shards by ZeRO "
            f"only; remove mpu, and set zero_optimization.stage to 3 for a model that does not fit"
        )
    is_pair = isinstance(mesh_param, (tuple, list)) and len(mesh_param) == 2
    if mesh_param is not None and not (is_pair and mesh_param[1] == 1):
        raise ValueError(f"{mesh_param=} asks for sequence parallelism, which there is not; remove it")


def _check_joining(dist_init_required: bool | None, port: int) -> None:
    if dist_init_required is not None:
        check_flag("dist_init_required", dist_init_required)
    check_integer("distributed_port", port, 0, 65535)


def _choose_config(args: Any, config: Any, config_params: Any) -> Any:
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        found = " and ".join(given) or "nothing"
        raise ValueError(f"config: got {found}; pass exactly one config, a dict or the path of a JSON file")
    return next(iter(given.values()))


def _load_same_config(config: Any, arguments: Any, unit_size: int) -> EngineConfig:
    """The checked config; collective. An error of one process is raised on all: none waits for another in vain."""
    own: EngineConfig | ValueError
    try:
        own = load_config(config, world_size=get_world_size() // unit_size, arguments=arguments)
    except ValueError as error:
        own = error
    everywhere = gather_objects(own)
    if isinstance(own, ValueError):
        raise own
    for rank, other in enumerate(everywhere):
        if isinstance(other, ValueError):
            raise ValueError(f"config of rank {rank}: {other}")
        if differences := own.differences(other):
            raise ValueError(
                f"config: rank {get_rank()} and rank {rank} differ in {', '.join(differences)}; give all processes the "
                f"same config"
            )
    return own


def _join_processes(dist_init_required: bool | None, port: int) -> None:
    os.environ.update(describe_process(os.environ))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if dist_init_required is False and world_size > 1 and not dist.is_initialized():
        raise ValueError(
            f"dist_init_required=False with WORLD_SIZE={world_size} and no process group; call "
            f"torch.distributed.init_process_group() first, or leave dist_init_required out"
        )
    init_distributed(port)
    # Scripts that were launched, and libraries that take this for deepspeed, go on with get_rank() and barrier().
    is_wanted = "WORLD_SIZE" in os.environ or _stands_for_deepspeed()
    if dist_init_required or (dist_init_required is None and is_wanted):
        join_alone()


def _stands_for_deepspeed() -> bool:
    """Whether `import deepspeed` means this engine in this process."""
    return getattr(sys.modules.get("deepspeed"), "initialize", None) is initialize
