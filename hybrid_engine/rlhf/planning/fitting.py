"""Compares a plan with the available memory: whether it fits, how much is missing, which options to change first.

The command `hybrid-engine plan` calls `plan` and prints what it returns (`cli/plan.py`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from hybrid_engine.config.checks import flag
from hybrid_engine.containers.device import free_and_total_bytes
from hybrid_engine.distributed.processes import default_device
from hybrid_engine.generation.memory import MAX_RUNNING
from hybrid_engine.metrics.memory import format_bytes, read_bytes
from hybrid_engine.rlhf.options.shared import AnswerOptions, TrainingOptions, fit_minibatch
from hybrid_engine.rlhf.planning.memory_plan import MemoryPlan
from hybrid_engine.rlhf.planning.reading import Read, read_run
from hybrid_engine.rlhf.planning.roles import Setting, plan_memory
from hybrid_engine.rlhf.runs.engine_config import choose_dtype
from hybrid_engine.rlhf.runs.run_checks import IS_PACKED

ADAPTER: dict[str, Any] = {"lora_rank": 16}
AGAIN: dict[str, Any] = {"activation_checkpointing": True}
MOST_PROCESSES = 64
TOGETHER = "together"
"""The kind of several changes at once, which are tried if none of the earlier changes suffices."""


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
