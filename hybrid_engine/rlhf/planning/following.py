"""Attaches a memory plan to a run: its engines report the plan, and measure their memory while they train."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid_engine.containers.device import num_bytes
from hybrid_engine.distributed.processes import default_device, gather_objects, get_world_size
from hybrid_engine.engine.memory_report import count_bytes
from hybrid_engine.metrics.memory_plan import MemoryPlan
from hybrid_engine.metrics.memory_use import MemoryUse, Pass
from hybrid_engine.rlhf.batches.passes import Items
from hybrid_engine.rlhf.data.encoding import Encoded, EncodedPair
from hybrid_engine.rlhf.options.preference import PreferenceOptions
from hybrid_engine.rlhf.options.shared import TrainingOptions
from hybrid_engine.rlhf.planning.reading import Learned, Read, read_answers, read_preferences
from hybrid_engine.rlhf.planning.roles import Setting, plan_memory
from hybrid_engine.rlhf.runs.run_log import say, write_json
from hybrid_engine.rlhf.tasks.corpus import PairCorpus
from hybrid_engine.zero.fsdp2_private import gathered_storages


def follow_examples(
    config: TrainingOptions, engine: Any, examples: Sequence[Encoded], batches: list[list[int]]
) -> None:
    """Follows a run of sft; `batches` are the indices of `examples` by step."""
    read = Read(first=engine.module.config, learned=Learned.of(Items.of(examples), batches))
    follow_memory("sft", config, read, [engine])


def follow_scored_pairs(config: TrainingOptions, engine: Any, corpus: PairCorpus) -> None:
    """Follows a run of reward."""
    read = Read(first=engine.module.config, learned=Learned.of(Items.of(corpus.train), corpus.batches))
    follow_memory("reward", config, read, [engine])


def follow_preferences(
    recipe: str, config: PreferenceOptions, engine: Any, learned: Sequence[Encoded | EncodedPair]
) -> None:
    """Follows a run that learns from given answers and answers some of their prompts."""
    follow_memory(recipe, config, read_preferences(config, engine.module.config, learned), [engine])


def follow_answers(recipe: str, config: TrainingOptions, start: Any, policy: Any, critic: Any = None) -> None:
    """Follows a run that learns from its own answers.

    Args:
        recipe, config: as in `follow_memory`.
        start: an `experience.start.Start`.
        policy: an `experience.policy.TrainedPolicy`.
        critic: an engine, or a role of the actor's.
    """
    specs, first = start.rewards.specs, policy.actor.module.config
    read = read_answers(config, specs, first, start.answered, start.source, has_critic=critic is not None)
    judges = [getattr(reward.judge, "model", None) for reward in start.rewards.rewards]
    engines = [policy.actor, *([critic] if hasattr(critic, "sharding") else [])]
    frozen = [policy.reference, *(model for model in judges if isinstance(model, nn.Module))]
    follow_memory(recipe, config, read, engines, frozen)


def fuses_at_once(recipe: str, config: TrainingOptions, start: Any, first: PretrainedConfig) -> bool:
    """Whether rollouts on a shared base fit into the memory of training if all linears are fused at once.

    Returns False if a model cannot be counted on shapes alone; the same on all processes.

    Args:
        recipe, config: as in `follow_memory`.
        start: an `experience.start.Start`.
        first: config of the base.
    """
    read = read_answers(config, start.rewards.specs, first, start.answered, start.source, has_critic=True)
    setting = Setting(recipe=recipe, config=config, num_processes=get_world_size(), device=default_device().type)
    try:
        return plan_memory(read, setting).fuses_at_once
    except Exception:  # as in `follow_memory`, which logs it
        return False


def follow_memory(
    recipe: str, config: TrainingOptions, read: Read, engines: Sequence[Any], frozen: Iterable[nn.Module | None] = ()
) -> None:
    """Plans the run, and makes its engines report the plan and measure their memory; local.

    If a model cannot be counted on shapes alone, a log line says why there is no plan.

    Args:
        recipe: its name on the command line.
        config: of that recipe.
        read: the data and model configs of the run.
        engines: that it trains.
        frozen: its other models.
    """
    device = default_device()
    setting = Setting(recipe=recipe, config=config, num_processes=get_world_size(), device=device.type)
    try:
        plan = plan_memory(read, setting)
    except Exception as error:  # any error of a model's own code when tensors have no values
        say(f"memory: no plan of this run, because {type(error).__name__}: {error}")
        return
    others = [model for model in frozen if model is not None]

    def held() -> int:
        trained = sum(sum(vars(count_bytes(engine.sharding, engine.optimizer)).values()) for engine in engines)
        modules = [*(engine.module for engine in engines), *others]
        buffers = num_bytes(buffer for module in modules for buffer in module.buffers())
        return trained + buffers + num_bytes(p for model in others for p in model.parameters())

    def resized() -> Iterable[torch.UntypedStorage]:
        for engine in engines:
            if not engine.sharding.stays_whole:
                yield from gathered_storages(engine.sharding.fsdp_modules())

    def of_pass(ran: Pass) -> MemoryPlan:
        return plan_memory(read, replace(setting, ran=ran))

    use = MemoryUse(plan, device, held, resized, plan_of_pass=of_pass if read.learned is None else None)
    for engine in engines:
        engine.memory_use = use


def write_result(path: Path, result: dict[str, Any], engine: Any) -> None:
    """Writes `result` with the planned and measured memory of the run of `engine`, and logs it; collective.

    The measurements are those of the process with the highest peak.
    """
    use: MemoryUse | None = engine.memory_use
    everyones = gather_objects(None if use is None else use.measured())
    measured = [found for found in everyones if found is not None]
    if use is not None and len(measured) == len(everyones):
        use.take_largest(measured)
        say(use.describe())
        result = result | {"memory": use.to_json()}
    elif measured:
        say("memory: not compared with the plan, which another process could not make")
    write_json(path, result)
