"""Compares a plan with the available memory: whether it fits, how much is missing, which options to change first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hybrid_engine.containers.device import free_and_total_bytes
from hybrid_engine.distributed.processes import default_device
from hybrid_engine.generation.memory import MAX_RUNNING
from hybrid_engine.metrics.memory_plan import MemoryPlan, format_bytes, read_bytes
from hybrid_engine.rlhf.options.shared import AnswerOptions, TrainingOptions, fit_minibatch
from hybrid_engine.rlhf.planning.reading import Read, check_one_process, read_run
from hybrid_engine.rlhf.planning.roles import Setting, plan_memory
from hybrid_engine.rlhf.runs.engine_config import choose_dtype

ADAPTER_RANK = 16
"""Rank of an adapter that is proposed."""
MOST_PROCESSES = 64
TOGETHER = "together"
"""The kind of several changes at once, which are tried if none of the earlier changes suffices."""


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
            yield "  none of them is enough; take a smaller model, or more memory"
        if not self.remedies:
            yield "  no option of this recipe makes it smaller; take a smaller model"


def plan(recipe: str, config: TrainingOptions, wishes: Any) -> Fitted:
    """The plan of a recipe with its `Config`; reads data and configs, but no weights.

    Args:
        recipe: its name on the command line.
        config: of that recipe.
        wishes: a `cli.plan.PlanWishes`.

    Raises:
        ValueError: a source that an option names cannot be read, or does not fit the processes.
    """
    device = default_device()
    if wishes.memory is None:
        memory, text = free_and_total_bytes(device)[0], "free here now, without the interpreter and its libraries"
    else:
        memory, text = read_bytes(wishes.memory, "memory"), f"--memory {wishes.memory}"
    read, config = read_run(recipe, fit_minibatch(config, wishes.processes))
    check_one_process((read.first, read.critic), wishes.processes)
    setting = Setting(recipe=recipe, config=config, num_processes=wishes.processes, device=device.type)
    found = plan_memory(read, setting)
    processes = f"{wishes.processes} process{'es' * (wishes.processes > 1)}"
    lengths = ""
    if isinstance(config, AnswerOptions):
        lengths = f", prompts of up to {config.max_prompt_tokens} tokens, answers of up to {config.max_new_tokens},"
    title = f"{recipe}{lengths} on {processes}, a {device.type} each, {choose_dtype(config.dtype, device.type)}"
    remedies = [] if found.peak_bytes <= memory else _remedies(read, setting, found, memory)
    return Fitted(title=title, plan=found, memory_bytes=memory, memory_text=text, remedies=remedies)


def _remedies(read: Read, setting: Setting, plan: MemoryPlan, memory_bytes: int) -> list[Remedy]:
    """Changes that reduce the peak, sufficient ones first, otherwise in the order of `_changes`."""
    found: dict[str, Remedy] = {}
    generates_much = plan.generation_peak_bytes > min(plan.training_peak_bytes, memory_bytes)
    for kind, change, changed in _changes(setting, generates_much):
        if any(remedy.peak_bytes <= memory_bytes for name, remedy in found.items() if kind in (name, TOGETHER)):
            continue
        peak = plan_memory(read, changed).peak_bytes
        if peak < (found[kind].peak_bytes if kind in found else plan.peak_bytes):
            found[kind] = Remedy(change=change, peak_bytes=peak)
    return sorted(found.values(), key=lambda remedy: remedy.peak_bytes > memory_bytes)


def _changes(setting: Setting, generates_much: bool) -> Iterator[tuple[str, str, Setting]]:
    """Changes by kind, from the cheapest kind on, and more and more of each kind."""
    config = setting.config

    def changed(**options: Any) -> Setting:
        return replace(setting, config=replace(config, **options))

    most = 1
    if generates_much and isinstance(config, AnswerOptions):
        most = config.max_running or MAX_RUNNING.get(setting.device, 256)
    fewer = [most >> n for n in range(1, most.bit_length())]
    for rows in fewer:
        yield "rows", f"--max-running {rows}", changed(max_running=rows)
    size = config.micro_batch_size
    while not config.tokens_per_micro_batch and size > 1:
        size //= 2
        yield "size", f"--micro-batch-size {size}", changed(micro_batch_size=size)
    if not (config.activation_checkpointing or config.exact):
        yield "again", "--activation-checkpointing", changed(activation_checkpointing=True)
        if not config.tokens_per_micro_batch:
            both = {"activation_checkpointing": True, "micro_batch_size": 1}
            words = "--activation-checkpointing --micro-batch-size 1"
            yield TOGETHER, words, changed(**both)
            for rows in fewer[1::3]:  # each is a plan of its own, which takes a second
                yield TOGETHER, f"{words} --max-running {rows}", changed(**both, max_running=rows)
    if config.measure_kl and config.keeps_reference:
        unmeasured = changed(measure_kl=False)
        if not unmeasured.config.keeps_reference:
            yield "reference", "--no-measure-kl", unmeasured
    if config.model and not config.lora_rank:
        change = f"--lora-rank {ADAPTER_RANK}"
        yield "adapter", change, changed(lora_rank=ADAPTER_RANK)
        if not config.exact:
            all_of_it = changed(lora_rank=ADAPTER_RANK, activation_checkpointing=True)
            yield TOGETHER, f"{change} --activation-checkpointing", all_of_it
    processes = 2 * setting.num_processes
    while processes <= min(MOST_PROCESSES, config.update_size) and config.update_size % processes == 0:
        sharded = replace(changed(zero_stage=3), num_processes=processes)
        yield "processes", f"--zero-stage 3 on {processes} processes", sharded
        processes *= 2
