"""Opens live batches: gathers weights, fuses adapters and allocates a KV workspace for sequences that join later.

If several adapters are served, each has a live batch, and one adapter at a time is fused into the weights. Rows of two
adapters never take a turn together. The batch whose adapter is fused takes TURNS_AT_ONCE turns while others have work,
then the next batch does: a switch fuses all adapted weights again, and each batch waits at most for the turns of the
others. The KV workspace is divided evenly, so that the rows of a batch stay in place during the turns of others.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from hybrid_engine.config import HybridEngineConfig
from hybrid_engine.config.checks import check_integer
from hybrid_engine.config.notices import say_once
from hybrid_engine.containers.cache import ModelCache
from hybrid_engine.containers.device import on_device
from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.distributed.verdict import naming_who_left
from hybrid_engine.generation.core import Prompt, RolloutPlan, Sequence
from hybrid_engine.generation.live.batches import (
    ContainerBatch,
    KVUsage,
    LiveBatch,
    Progress,
    SettledBatch,
    StagedBatch,
    StreamedBatch,
    open_own,
)
from hybrid_engine.generation.live.shared import LeadingBatch, LiveLink
from hybrid_engine.generation.memory import (
    BLOCK_SIZE,
    LIVE_BLOCK_SIZE,
    MAX_RUNNING,
    NEEDED_SLOTS,
    MemoryLimit,
    plan_rollout,
)
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.generation.rollout.generator import Generator
from hybrid_engine.generation.rollout.stages import OrderedTurns, StageRollouts
from hybrid_engine.generation.step import ContainerRollouts, chunk_tokens

TURNS_AT_ONCE = 32


@contextmanager
def live_batch(
    generator: Generator,
    longest: int | None = None,
    max_running: int | None = None,
    link: LiveLink | None = None,
    adapters: tuple[str, ...] = (),
    caller: str = "serving()",
    memory: MemoryLimit | None = None,
) -> Iterator[LiveBatch]:
    """Inside, weights are gathered, LoRA is fused and the KV workspace allocated for a batch that starts empty.

    Collective if weights are sharded or shared: each process with a whole model has a batch of its own; processes that
    share one have the same batch, which one of them leads.

    Args:
        generator: generator whose module is in eval mode.
        longest: number of tokens of prompt and answer together; None: as many as the model, `max_out_tokens` and memory
            allow.
        max_running: number of sequences that decode at once; None: as many as in a rollout.
        link: link of the processes that share the model.
        adapters: adapters of a peft model, each with a batch in addition to the base model's; empty: the active one is
            fused, as in a rollout.
        caller: name of the function or command for errors and notices.
        memory: limit of the KV workspace; None: that of a rollout.

    Raises:
        ValueError: the model is in another live batch; it has no containers, and processes share it or `adapters` are
            requested; several processes share it without a link; or memory does not suffice for one sequence.
    """
    partners = generator.partners
    # A thread of a live batch starts on device 0.
    with on_device(generator.device), torch.inference_mode(False), torch.no_grad(), ExitStack() as release:
        if generator.model is None and link is None and not adapters:
            own = partners.agree(lambda: _open_own(generator, longest, release, caller))
            generator.is_live = True
            release.callback(setattr, generator, "is_live", False)
            say_once(f"sequences are answered one by one, by the model's own generate(): {generator.fallback_reason}")
            yield own
            return
        spare = partners.agree(lambda: _spare_bytes(generator, memory))
        of_all = generator.group.gather_objects(Memory(spare, generator.memory.training_bytes))
        num_parts = len(adapters) + 1 if adapters else 1
        asked = LiveBatchRequest(longest, max_running, link is not None, num_parts, caller)
        plan = partners.agree(lambda: _plan(generator, asked, of_all))
        native = generator.native
        assert native is not None
        num_blocks, num_slots = (
            num_parts * (number + native.num_reserved) - native.num_reserved
            for number in (plan.num_blocks, plan.num_state_slots)
        )
        whole = replace(plan, num_blocks=num_blocks, num_state_slots=num_slots)
        cache = partners.agree(lambda: native.gather(whole, release, is_recorded=not adapters))
        generator.is_live = True
        release.callback(setattr, generator, "is_live", False)
        if generator.gatherer.is_streamed:
            strategy = partners.agree(lambda: native.start(plan, cache))
            say_once(f"{caller}: layers are gathered one by one on every turn, with those of all processes")
            streamed = StreamedBatch(ContainerBatch(native.model, strategy, plan.longest + 1), native, partners)
            with streamed.leaving():
                yield streamed
            return
        if adapters and generator.group.slices is not None:  # each group of processes switches at its own time
            release.enter_context(generator.group.slices.keeping())
        batch = partners.agree(lambda: _open(generator, native, plan, cache, adapters, release))
        if link is None:
            yield batch
            return
        release.enter_context(naming_who_left(caller))
        if link.is_leader:
            release.enter_context(link.leading())
            yield LeadingBatch(batch, link)
        else:
            yield batch


def _open(
    generator: Generator,
    native: ContainerRollouts,
    plan: RolloutPlan,
    cache: ModelCache,
    adapters: tuple[str, ...],
    release: ExitStack,
) -> LiveBatch:
    """Opens the batch of the whole weights, or one for the base model and each of `adapters`, with parts of `cache`.

    Registers what must be released on `release`.
    """
    if not adapters:
        return _open_one(native, plan, cache)
    fused = FusedAdapter(generator.module, native.model)
    release.callback(fused.give_back)
    names: tuple[str | None, ...] = (None, *adapters)
    batches: dict[str | None, SettledBatch] = {}
    for name, part in zip(names, split_workspace(cache, native.model, plan, len(names)), strict=True):
        fused.fuse(name)
        # A graph holds addresses, which fusing again may change; on a CPU they stay.
        batches[name] = _open_one(native, plan, part, is_recorded=cache.device.type == "cpu")
    return AdapterBatches(batches, fused)


def _open_one(
    native: ContainerRollouts, plan: RolloutPlan, cache: ModelCache, is_recorded: bool = True
) -> SettledBatch:
    model, longest = native.model, plan.longest + 1
    if not isinstance(native, StageRollouts):
        # Of prompts that come at once, the first ones are answered before the last ones are fed. 64 clients of
        # bench_serving.py's chats waited 2.58 s of the server's CPU time for the first token (median; 11.3 s at the
        # 95th percentile) with two chunks in a pass, 3.35 and 13.0 s with one: each pass copies the weights into the
        # layout of the matrix product.
        if cache.device.type == "cpu" and native.mixes:
            plan = replace(plan, max_prefill_tokens=2 * chunk_tokens(cache.device))
        return ContainerBatch(model, native.start(plan, cache, is_recorded=is_recorded), longest)
    batches = native.start_live(plan, cache)
    return StagedBatch(
        model, batches, longest, OrderedTurns(native.model.links, model.dtype, len(batches), native.peers)
    )


class Memory(NamedTuple):
    """Memory of one process for a live batch, in bytes."""

    spare: int
    """Bytes for the KV workspace."""
    training: int
    """Bytes that training will take of them."""


class LiveBatchRequest(NamedTuple):
    """A requested live batch; `longest` and `max_running` are those of `live_batch`."""

    longest: int | None
    max_running: int | None
    is_linked: bool
    num_parts: int
    """Number of workspaces, one for each adapter and the base model."""
    caller: str


def _check_free(generator: Generator, caller: str) -> None:
    if generator.is_live:
        raise ValueError(f"{caller}: the model is already in use by serving() or generate_async(); end that first")


def _spare_bytes(generator: Generator, limit: MemoryLimit | None) -> int:
    if limit is None:
        return generator.memory.spare_bytes(generator.model)
    return generator.memory.served_bytes(generator.model, limit)


def _open_own(generator: Generator, longest: int | None, release: ExitStack, caller: str) -> LiveBatch:
    _check_free(generator, caller)
    return open_own(generator, longest, release, caller)


def _plan(generator: Generator, asked: LiveBatchRequest, memory: list[Memory]) -> RolloutPlan:
    """Plans a KV workspace, one of `num_parts`, for the requested number of sequences, or as many as memory allows."""
    config, model, native = generator.config, generator.model, generator.native
    longest, max_running, is_linked, num_parts, caller = asked
    _check_free(generator, caller)
    if model is None or native is None:
        kind, remedy = "several adapters are served", "serve one"
        if num_parts == 1:
            kind, remedy = f"{generator.group.size} processes share it", f"set {generator.group.remedy}"
        raise ValueError(f"{caller}: {generator.fallback_reason}, but a model needs containers where {kind}; {remedy}")
    if generator.group.size > 1 and not is_linked:
        raise ValueError(
            f"{caller}: processes share the model, but requests come to one process alone; use serving(), or a process "
            "with memory for the whole model"
        )
    if generator.gatherer.is_streamed and (is_linked or num_parts > 1):
        raise ValueError(
            f"{caller}: layers are gathered one by one, which works neither where processes share the model nor with "
            "several adapters; use more processes, or serve one adapter"
        )
    limit = min(config.max_out_tokens, (model.max_positions or config.max_out_tokens) + 1)
    is_free = longest is None
    longest = limit if longest is None else longest
    check_integer("longest", longest, 2, limit)
    rows = config.max_running or MAX_RUNNING.get(generator.device.type, 256) if max_running is None else max_running
    check_integer("max_running", rows, 1)
    spare, training = min(process.spare for process in memory) // num_parts, max(each.training for each in memory)
    if generator.exact is None:
        # The next turn of a conversation continues from the blocks of the last one. On a CPU, where a rollout gives
        # each sequence a single block, small blocks took 0.97 to 1.03 of the CPU seconds.
        automatic = LIVE_BLOCK_SIZE.get(generator.device.type, BLOCK_SIZE)
        config = replace(config, kv_block_size=config.kv_block_size or automatic)
    num_held = _most_tokens(model, config, spare, native.num_reserved)
    longest = max(2, min(longest, num_held)) if is_free else longest
    if longest > num_held:
        raise ValueError(
            f"longest={longest}: a prompt and its answer of so many tokens do not fit into {spare:,} bytes, which hold "
            f"{num_held} tokens; lower it, ask for shorter answers (max_new_tokens), raise memory or free some"
        )
    options = GenerationOptions(max_new_tokens=longest - 1)
    shapes = [Sequence(Prompt([0]), row, options) for row in range(rows)]
    plan = plan_rollout(model, shapes, options, config, spare, native.num_reserved, training, is_live=True)
    num_blocks = max(plan.num_blocks, plan.num_columns + 1)  # samples of the longest prompt fork into one more
    return replace(plan, sequences=[], own=slice(0), longest_later=plan.longest, num_blocks=num_blocks)


def _most_tokens(model: InferenceModel, config: HybridEngineConfig, spare_bytes: int, num_reserved: int) -> int:
    """Number of tokens of the longest sequence that memory suffices for."""

    slot_bytes = model.bytes_per_slot()
    spare_bytes = max(0, spare_bytes - (num_reserved + NEEDED_SLOTS) * slot_bytes)
    if config.kv_block_size == 0 and model.device.type == "cpu":  # one block holds a whole sequence
        return spare_bytes // max(1, model.bytes_per_block(1)) // (num_reserved + 2)
    block_size = config.kv_block_size or BLOCK_SIZE
    return count_tokens(model.bytes_per_block(block_size), block_size, spare_bytes, num_reserved)


def count_tokens(block_bytes: int, block_size: int, spare_bytes: int, num_reserved: int) -> int:
    """Number of tokens of the longest sequence in these blocks, less the reserved ones and one for a fork."""
    return max(0, spare_bytes // max(1, block_bytes) - num_reserved - 1) * block_size


class FusedAdapter:
    """The adapter of a peft model that its containers read; None: the base model alone.

    Args:
        module: a `PeftModel`, whose active adapter changes meanwhile.
    """

    def __init__(self, module: nn.Module, model: InferenceModel):
        self._module, self._model = module, model
        self._before: str = module.active_adapter  # type: ignore[assignment]
        self._trained = {parameter: parameter.requires_grad for parameter in module.parameters()}
        self._fused: str | None = self._before

    def fuse(self, name: str | None) -> None:
        """Fuses this adapter in place of the current one."""
        if name == self._fused:
            return
        self._model.unfuse_lora()
        self._activate(name)
        self._model.fuse_lora()
        self._fused = name

    def give_back(self) -> None:
        """Restores the active adapter and the trained parameters; nothing is fused after it."""
        self._model.unfuse_lora()
        self._activate(self._before)
        for parameter, is_trained in self._trained.items():
            parameter.requires_grad_(is_trained)

    def _activate(self, name: str | None) -> None:
        tuner = self._module.base_model
        if name is None:
            tuner.disable_adapter_layers()  # type: ignore[operator, union-attr]
        else:
            tuner.enable_adapter_layers()  # type: ignore[operator, union-attr]
            self._module.set_adapter(name)  # type: ignore[operator]


class AdapterBatches:
    """The batches of all adapters as one batch.

    Args:
        batches: batch of each adapter; None is the base model.
    """

    seconds_between_stays = None

    def __init__(self, batches: Mapping[str | None, SettledBatch], fused: FusedAdapter):
        self._batches, self._fused = batches, fused
        self._current, self._num_turns = next(iter(batches)), 0
        self._settled: list[Progress] = []  # not reported yet
        self.longest = min(batch.longest for batch in batches.values())

    @property
    def has_work(self) -> bool:
        """Whether a turn has a result."""
        return bool(self._settled) or any(batch.has_work for batch in self._batches.values())

    @property
    def num_running(self) -> int:
        """Number of sequences that decode, each in the turns of its adapter."""
        return sum(batch.num_running for batch in self._batches.values())

    @property
    def num_waiting(self) -> int:
        """Number of sequences that have not started, or start again."""
        return sum(batch.num_waiting for batch in self._batches.values())

    @property
    def kv_blocks(self) -> KVUsage:
        """Use of the KV blocks of all adapters' batches together."""
        return KVUsage(*map(sum, zip(*(batch.kv_blocks for batch in self._batches.values()), strict=True)))

    @property
    def unfinished(self) -> list[Sequence]:
        """All sequences for which progress is still to come."""
        return [sequence for batch in self._batches.values() for sequence in batch.unfinished]

    def add(self, sequences: list[Sequence]) -> None:
        """Queues sequences, each in its adapter's batch."""
        for name, batch in self._batches.items():
            own = [sequence for sequence in sequences if sequence.adapter == name]
            if any(sequence.prompt.num_tops is not None for sequence in own):
                self._settled += [told for other in self._batches.values() for told in other.settle()]
                self._fused.fuse(name)  # prompts are scored as they join
            batch.add(own)

    def cancel(self, sequences: list[Sequence]) -> None:
        """Removes `sequences` from their adapters' batches, whether they run or wait."""
        for name, batch in self._batches.items():
            batch.cancel([sequence for sequence in sequences if sequence.adapter == name])

    def take_out(self) -> list[Progress]:
        """Removes all sequences from all adapters' batches; returns the progress not reported yet."""
        settled, self._settled = self._settled, []
        return settled + [told for batch in self._batches.values() for told in batch.take_out()]

    def stay(self) -> None:
        """Does nothing: no process waits for this one."""

    def turn(self) -> list[Progress]:
        """Takes a turn of the batch whose adapter is fused, or of the next one that has work."""
        before, self._current = self._current, self._choose()
        progress, self._settled = self._settled, []
        if before != self._current:
            progress += self._batches[before].settle()
        self._fused.fuse(self._current)
        self._num_turns += 1
        return progress + self._batches[self._current].turn()

    def _choose(self) -> str | None:
        names = list(self._batches)
        place = names.index(self._current)
        others = [name for name in (*names[place + 1 :], *names[:place]) if self._batches[name].has_work]
        if not others or (self._batches[self._current].has_work and self._num_turns < TURNS_AT_ONCE):
            return self._current
        self._num_turns = 0
        return others[0]


def split_workspace(cache: ModelCache, model: InferenceModel, plan: RolloutPlan, num_parts: int) -> list[ModelCache]:
    """Returns the caches of `num_parts` batches like `plan` in the memory of `cache`."""
    shape = model.cache_shape(cache.num_blocks // num_parts, plan.block_size, cache.num_slots // num_parts)
    return cache.split([shape] * num_parts)
