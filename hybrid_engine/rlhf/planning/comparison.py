"""Compares the plan of a run's memory with the memory that is available, and with the memory that the run takes.

Before the run `hybrid-engine plan` (`cli/commands.py`) calls `plan`, which says whether it fits, how much is missing
and which options to change first. A recipe calls `follow_memory` when its engines are built, and `write_result` at its
end.

On a GPU the measured value is the peak of PyTorch's allocator from the first training step on. The CPU's allocator
counts nothing; there bytes of tensors are counted: those that exist when a training pass begins, and the peak of those
that its ops create (`LiveBytes`). Counting slows a pass down, so a pass is counted only if its extent is not within
that of a counted pass of the same state: with or without gradients, and with or without optimizer state, which does not
exist in the first step. A rollout counts the tensors that exist, its KV workspace, gathered weights and fused adapters;
it does not count the intermediate tensors of its passes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid_engine.config.checks import flag
from hybrid_engine.containers.device import free_and_total_bytes, num_bytes
from hybrid_engine.distributed.processes import default_device, gather_objects, get_world_size
from hybrid_engine.engine.hybrid_engine import HybridEngine
from hybrid_engine.generation.memory import MAX_RUNNING
from hybrid_engine.metrics.memory import LiveBytes, format_bytes, process_peak_bytes, read_bytes
from hybrid_engine.optim.state_offload import count_bytes
from hybrid_engine.rlhf.batches.passes import Extent, PassShape, RunPasses, extent_of
from hybrid_engine.rlhf.experience.policy import TrainedPolicy
from hybrid_engine.rlhf.experience.start import Start
from hybrid_engine.rlhf.options.shared import AnswerOptions, TrainingOptions, fit_minibatch
from hybrid_engine.rlhf.planning.memory_plan import MemoryPlan, Setting, plan_memory
from hybrid_engine.rlhf.planning.reading import Read, read_answers, read_run
from hybrid_engine.rlhf.planning.training_passes import Pass
from hybrid_engine.rlhf.runs.engine_config import choose_dtype
from hybrid_engine.rlhf.runs.run_checks import IS_PACKED
from hybrid_engine.rlhf.runs.run_log import say, write_json
from hybrid_engine.rlhf.runs.stages import load_config
from hybrid_engine.zero.fsdp2_private import gathered_storages

ADAPTER: dict[str, Any] = {"lora_rank": 16}
AGAIN: dict[str, Any] = {"activation_checkpointing": True}
MOST_PROCESSES = 64
TOGETHER = "together"
"""The kind of several changes at once, which are tried if none of the earlier changes suffices."""
MIB = 2**20


class Change(NamedTuple):
    """A change of a run's options, and of its processes."""

    kind: str
    options: dict[str, Any]
    num_processes: int

    def __str__(self) -> str:
        words = " ".join(_shown(name, value) for name, value in self.options.items())
        return f"{words} on {self.num_processes} processes" if self.kind == "processes" else words


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag(name) if value else flag(f"no_{name}")
    return f"{flag(name)} {value}"


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change of options, and the peak memory of the run with it."""

    change: str
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A plan and the memory that is available for it."""

    title: str
    plan: MemoryPlan
    memory_bytes: int
    memory_text: str
    """The origin of that number."""
    remedies: list[Remedy]
    """Changes to make if the plan does not fit, the smallest change first."""

    @property
    def missing_bytes(self) -> int:
        """Bytes that are missing; 0 if the plan fits."""
        return max(0, self.plan.peak_bytes - self.memory_bytes)

    def to_json(self) -> dict[str, Any]:
        """The plan, the available memory and the remedies, as plain values for JSON."""
        return self.plan.to_json() | {
            "memory_bytes": self.memory_bytes,
            "missing_bytes": self.missing_bytes,
            "remedies": [vars(remedy) for remedy in self.remedies],
        }

    def lines(self) -> Iterator[str]:
        """The plan in words."""
        yield self.title
        yield from self.plan.lines()
        yield f"memory:             {format_bytes(self.memory_bytes):>10}  ({self.memory_text})"
        if not self.missing_bytes:
            yield "it fits"
            return
        yield f"it does not fit: {format_bytes(self.missing_bytes)} are missing"
        for number, remedy in enumerate(self.remedies):
            missing = remedy.peak_bytes - self.memory_bytes
            what = "fits" if missing <= 0 else f"{format_bytes(missing)} still missing"
            order = "change first" if number == 0 else "or"
            yield f"  {order}: {remedy.change}: {format_bytes(remedy.peak_bytes)}, {what}"
        if self.remedies and self.remedies[0].peak_bytes > self.memory_bytes:
            yield "  none of them is enough; use a smaller model or more memory"
        if not self.remedies:
            yield "  no option of this recipe reduces it; use a smaller model"


def plan(recipe: str, config: TrainingOptions, memory: str | None, num_processes: int) -> Fitted:
    """The plan of a recipe; reads data and configs, but no weights.

    Args:
        recipe: its name on the command line.
        config: of that recipe.
        memory: of a device, such as 24GB; None: the memory that is free here.
        num_processes: of the run.

    Raises:
        ValueError: a source that an option names cannot be read, or does not fit the processes.
    """
    device = default_device()
    if memory is None:
        free, text = free_and_total_bytes(device)[0], "free here now, without the interpreter and its libraries"
    else:
        free, text = read_bytes(memory, "memory"), f"--memory {memory}"
    read, config = read_run(recipe, fit_minibatch(config, num_processes))
    check_one_process((read.first, read.critic), num_processes)
    setting = Setting(recipe=recipe, config=config, num_processes=num_processes, device=device.type)
    found = plan_memory(read, setting)
    processes = f"{num_processes} process{'es' * (num_processes > 1)}"
    lengths = ""
    if isinstance(config, AnswerOptions):
        lengths = f", prompts of up to {config.max_prompt_tokens} tokens, answers of up to {config.max_new_tokens},"
    title = f"{recipe}{lengths} on {processes}, a {device.type} each, {choose_dtype(config.dtype, device.type)}"
    remedies = [] if found.peak_bytes <= free else _remedies(read, setting, found, free)
    return Fitted(title=title, plan=found, memory_bytes=free, memory_text=text, remedies=remedies)


def check_one_process(trained: Iterable[PretrainedConfig | None], num_processes: int) -> None:
    """Raises ValueError for several processes if one of the `trained` configs is of a quantized model."""
    if num_processes > 1 and any(getattr(config, "quantization_config", None) is not None for config in trained):
        raise ValueError(
            f"--processes={num_processes}: --model {IS_PACKED}; plan and train with --processes 1, or give the model "
            "in full precision"
        )


def _remedies(read: Read, setting: Setting, plan: MemoryPlan, memory_bytes: int) -> list[Remedy]:
    """Changes that reduce the peak, sufficient ones first, otherwise in the order of `_changes`."""
    found: dict[str, Remedy] = {}
    generates_much = plan.generation_peak_bytes > min(plan.training_peak_bytes, memory_bytes)
    for change in _changes(setting, generates_much):
        kind = change.kind
        if any(remedy.peak_bytes <= memory_bytes for name, remedy in found.items() if kind in (name, TOGETHER)):
            continue
        config = replace(setting.config, **change.options)
        peak = plan_memory(read, replace(setting, config=config, num_processes=change.num_processes)).peak_bytes
        if peak < (found[kind].peak_bytes if kind in found else plan.peak_bytes):
            found[kind] = Remedy(change=str(change), peak_bytes=peak)
    return sorted(found.values(), key=lambda remedy: remedy.peak_bytes > memory_bytes)


def _changes(setting: Setting, generates_much: bool) -> Iterator[Change]:
    """Changes by kind, from the cheapest kind on, and more and more of each kind."""
    config, processes, most = setting.config, setting.num_processes, 1
    if generates_much and isinstance(config, AnswerOptions):
        most = config.max_running or MAX_RUNNING.get(setting.device, 256)
    fewer = [{"max_running": most >> n} for n in range(1, most.bit_length())]
    size = 1 if config.tokens_per_micro_batch else config.micro_batch_size
    smaller = [{"micro_batch_size": size >> n} for n in range(1, size.bit_length())]
    found: list[tuple[str, dict[str, Any]]] = [("rows", options) for options in fewer]
    found += [("size", options) for options in smaller]
    if not (config.activation_checkpointing or config.exact):
        found.append(("again", AGAIN))
        if not config.tokens_per_micro_batch:
            both = AGAIN | {"micro_batch_size": 1}
            # Each is a plan of its own, which takes a second.
            found += [(TOGETHER, both | options) for options in ({}, *fewer[1::3])]
    if config.measure_kl and config.keeps_reference:
        found.append(("reference", {"measure_kl": False}))
    if config.model and not config.lora_rank:
        found.append(("adapter", ADAPTER))
        if not config.exact:
            found.append((TOGETHER, ADAPTER | AGAIN))
    yield from (Change(kind, options, processes) for kind, options in found)
    processes *= 2
    while processes <= min(MOST_PROCESSES, config.update_size) and config.update_size % processes == 0:
        yield Change("processes", {"zero_stage": 3}, processes)
        processes *= 2


class Measured(NamedTuple):
    """Peaks of a process so far, in bytes."""

    training_bytes: int = 0
    """Peak of training; 0 before a pass was measured."""
    generation_bytes: int = 0
    cache_bytes: int = 0
    """Bytes of the KV workspace that was kept during training."""
    rollout_cache_bytes: int = 0
    """Bytes of the KV workspace in the rollout that took most memory."""
    largest: Pass | None = None
    """The pass that took most memory."""
    allocated_bytes: int = 0
    """Peak of a GPU's allocator."""

    @property
    def has_passes(self) -> bool:
        """Whether the temporary parts of a rollout's passes are measured too."""
        return self.allocated_bytes > 0

    @property
    def total_bytes(self) -> int:
        """The peak of the run; 0 before a pass was measured."""
        return self.allocated_bytes or (max(self.training_bytes, self.generation_bytes) if self.training_bytes else 0)


class RunModels(NamedTuple):
    """The models of a run on this process."""

    engines: Sequence[Any]
    """The engines that the run trains; the first may generate."""
    frozen: Sequence[nn.Module] = ()

    @property
    def num_steps(self) -> int:
        """Optimizer steps so far."""
        return int(self.engines[0].global_steps)

    def held_bytes(self) -> int:
        """Bytes of all models, with what training keeps of them, on this process now."""
        trained = sum(sum(vars(count_bytes(engine.sharding, engine.optimizer)).values()) for engine in self.engines)
        modules = [*(engine.module for engine in self.engines), *self.frozen]
        buffers = num_bytes(buffer for module in modules for buffer in module.buffers())
        return trained + buffers + num_bytes(p for model in self.frozen for p in model.parameters())

    def gathered_storages(self) -> Iterator[torch.UntypedStorage]:
        """Storages that weights are gathered into, which `held_bytes` leaves out."""
        for engine in self.engines:
            if not engine.sharding.stays_whole:
                yield from gathered_storages(engine.sharding.fsdp_modules())

    def cache_bytes(self) -> int:
        """Bytes of the KV workspace now."""
        engine = self.engines[0]
        return engine.generator.workspace.allocated_bytes if isinstance(engine, HybridEngine) else 0

    def rollout_bytes(self) -> tuple[int, int]:
        """Bytes of the KV workspace of the rollouts since `eval()`, and of their gathered weights and fused adapters.

        Both are 0 if there were none.
        """
        engine = self.engines[0]
        cache = int(engine.latency_stats()["peak_kv_bytes"]) if isinstance(engine, HybridEngine) else 0
        return (cache, engine.generator.memory.bytes_to_gather(engine.generator.model)) if cache else (0, 0)


class RunMemory:
    """Measures the training passes and rollouts of a run; a `PassMeter`."""

    def __init__(self, device: torch.device, models: RunModels) -> None:
        self._device, self._models = device, models
        self._counted: dict[tuple[bool, bool], list[Extent]] = {}
        self._rank = (False, 0)  # largest pass on a GPU: whether the peak rose in it, and its extent
        self._measured = Measured()

    def measured(self) -> Measured:
        """Returns the peaks so far."""
        self._note_rollouts()
        if self._device.type != "cuda":
            return self._measured
        return self._measured._replace(allocated_bytes=torch.cuda.max_memory_allocated(self._device))

    @contextmanager
    def training_pass(self, shape: PassShape, *, has_gradients: bool) -> Iterator[None]:
        """Wraps a forward and backward pass, and measures it."""
        if not has_gradients:
            self._note_rollouts()
        ran = Pass(shape, has_gradients, has_state=self._models.num_steps > 0)
        extent, cache = extent_of(shape), self._models.cache_bytes()
        self._measured = self._measured._replace(cache_bytes=max(self._measured.cache_bytes, cache))
        if self._device.type == "cuda":
            with self._beside_allocator(ran, extent):
                yield
            return
        counted = self._counted.setdefault((ran.has_gradients, ran.has_state), [])
        if self._device.type != "cpu" or any(extent.is_within(other) for other in counted):
            yield
            return
        held = self._models.held_bytes() + cache
        with LiveBytes(self._models.gathered_storages()) as live:
            yield
        counted[:] = [extent, *(other for other in counted if not other.is_within(extent))]
        taken = held + live.peak_bytes
        if taken > self._measured.training_bytes:
            self._measured = self._measured._replace(training_bytes=taken, largest=ran)

    @contextmanager
    def _beside_allocator(self, ran: Pass, extent: Extent) -> Iterator[None]:
        """Records the last pass that raised the allocator's peak or, before there is one, that of largest extent."""
        before = torch.cuda.max_memory_allocated(self._device)
        try:
            yield
        finally:  # also after an out-of-memory error
            has_risen = torch.cuda.max_memory_allocated(self._device) > before
            rank = has_risen, sum(extent)
            if has_risen or rank > self._rank:
                self._rank, self._measured = rank, self._measured._replace(largest=ran)

    def _note_rollouts(self) -> None:
        cache, gathered = self._models.rollout_bytes()
        if cache and (taken := self._models.held_bytes() + cache + gathered) > self._measured.generation_bytes:
            self._measured = self._measured._replace(generation_bytes=taken, rollout_cache_bytes=cache)


class FollowedRun(NamedTuple):
    """A run whose memory is planned and measured."""

    plan: MemoryPlan
    memory: RunMemory
    replan: Callable[[Pass], MemoryPlan] | None
    """The plan of a run with this largest pass; None if the lengths of the training data were known before."""

    def compare(self, measured: Measured) -> dict[str, int | None]:
        """Planned and measured bytes, as they are stored, with the measurements of the process that took most.

        The plan includes the KV workspace during training if it was kept. `planned_for_lengths_bytes` is its peak for
        the actual lengths of answers, with the KV workspace in its actual size and as much of a rollout as is measured:
        None if the lengths were known before, or no pass was measured.
        """
        idle = self.plan.idle_cache_bytes if measured.cache_bytes else 0
        return {
            "planned_bytes": max(self.plan.training_peak_bytes + idle, self.plan.generation_peak_bytes),
            "planned_for_lengths_bytes": self._planned_for_lengths(measured),
            "measured_bytes": measured.total_bytes or None,
            "planned_training_bytes": self.plan.training_peak_bytes,
            "planned_generation_bytes": self.plan.generation_peak_bytes,
            "measured_training_bytes": measured.training_bytes or None,
            "measured_generation_bytes": measured.generation_bytes or None,
            "process_peak_bytes": process_peak_bytes(),
        }

    def _planned_for_lengths(self, measured: Measured) -> int | None:
        if measured.largest is None or (self.replan is None and not measured.generation_bytes):
            return None
        plan = self.plan if self.replan is None else self.replan(measured.largest)
        training = plan.training_peak_bytes + measured.cache_bytes
        if not measured.generation_bytes:  # as when answers are served
            return training
        return max(training, plan.rollout_bytes(measured.rollout_cache_bytes, has_passes=measured.has_passes))


def describe(found: Mapping[str, int | None]) -> str:
    """Describes planned and measured memory in one line; `found` is a result of `FollowedRun.compare`."""
    planned, measured = found["planned_bytes"] or 0, found["measured_bytes"]
    text = f"memory: planned {planned / MIB:.1f} MiB"
    if planned > max(found["planned_training_bytes"] or 0, found["planned_generation_bytes"] or 0):
        text += " with the KV workspace in addition to training"
    if not measured:
        return f"{text}, not measured before the first step"
    if for_lengths := found["planned_for_lengths_bytes"]:
        text, planned = f"{text}, {for_lengths / MIB:.1f} MiB for answers as long as they were", for_lengths
    return f"{text}, measured {measured / MIB:.1f} MiB ({planned / measured:.2f})"


def follow_memory(
    recipe: str,
    config: TrainingOptions,
    read: Read,
    sizes: RunPasses,
    engines: Sequence[Any],
    frozen: Iterable[nn.Module | None] = (),
) -> FollowedRun | None:
    """Plans the run, logs the plan, and measures its memory from now on; local.

    Returns None, with a log line, if a model cannot be counted on shapes alone.

    Args:
        recipe: its name on the command line.
        config: of that recipe.
        read: the data and model configs of the run.
        sizes: of its passes, which are measured.
        engines: that it trains; the first may generate.
        frozen: its other models.
    """
    device, setting = default_device(), _setting(recipe, config)
    plan = plan_or_say(read, setting)
    if plan is None:
        return None
    say("\n".join(plan.lines()))
    memory = RunMemory(device, RunModels(engines, [model for model in frozen if model is not None]))
    sizes.register_meter(memory)

    def replan(largest: Pass) -> MemoryPlan:
        return plan_memory(read, replace(setting, ran=largest))

    return FollowedRun(plan, memory, replan if read.learned is None else None)


def follow_answers(
    recipe: str,
    config: TrainingOptions,
    start: Start,
    policy: TrainedPolicy,
    critic: Any = None,
    teachers: Sequence[nn.Module] = (),
) -> FollowedRun | None:
    """Follows a run that learns from its own answers; `critic` is an engine, or a role of the actor's.

    `teachers`: frozen models that it learns from.
    """
    specs, first = start.rewards.specs, policy.actor.module.config
    read = read_answers(config, specs, first, start.answered, start.source, has_critic=critic is not None)
    judges = [getattr(reward.judge, "model", None) for reward in start.rewards.rewards]
    engines = [policy.actor, *([critic] if hasattr(critic, "sharding") else [])]
    averages = () if policy.average is None else policy.average.modules
    frozen = [policy.reference, *teachers, *averages, *(model for model in judges if isinstance(model, nn.Module))]
    return follow_memory(recipe, config, read, policy.sizes, engines, frozen)


def fuses_at_once(recipe: str, config: TrainingOptions, start: Start) -> bool:
    """Whether rollouts on a shared base fit into the memory of training if all linears are fused at once.

    Returns False if a model cannot be counted on shapes alone; the same on all processes.
    """
    first = load_config(start.source)
    read = read_answers(config, start.rewards.specs, first, start.answered, start.source, has_critic=True)
    plan = plan_or_say(read, _setting(recipe, config))
    return plan is not None and plan.fuses_at_once


def plan_or_say(read: Read, setting: Setting) -> MemoryPlan | None:
    """The plan of a run; None, with a log line, if a model cannot be counted on shapes alone."""
    try:
        return plan_memory(read, setting)
    except Exception as error:  # any error of a model's own code when tensors have no values
        say(f"memory: no plan of this run, because {type(error).__name__}: {error}")
        return None


def _setting(recipe: str, config: TrainingOptions) -> Setting:
    return Setting(recipe=recipe, config=config, num_processes=get_world_size(), device=default_device().type)


def write_result(path: Path, result: dict[str, Any], followed: FollowedRun | None) -> None:
    """Writes `result` with the planned and measured memory of a run, and logs it; collective.

    The measurements are those of the process with the highest peak.
    """
    everyones = gather_objects(None if followed is None else followed.memory.measured())
    measured = [found for found in everyones if found is not None]
    if followed is not None and len(measured) == len(everyones):
        memory = followed.compare(max(measured, key=lambda found: found.total_bytes))
        say(describe(memory))
        result = result | {"memory": memory}
    elif measured:
        say("memory: not compared with the plan, which another process could not make")
    write_json(path, result)
